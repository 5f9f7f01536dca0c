// SPDX-License-Identifier: MIT OR Apache-2.0
//! The objects behind handles.
//!
//! A handle is a number: generation, place and kind. A place has a new generation after each object, and generations of
//! a process begin at a random number. So a closed handle, or one of another process, finds no object.

use crate::status::Failure;
use crate::types::gin_status_t::{GIN_ERROR_HANDLE, GIN_ERROR_MEMORY};
use gin_boot::lock;
use std::any::Any;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::{Arc, LazyLock, Mutex};

/// The maximum number of objects at a time.
const PLACES: usize = 1 << 24;

macro_rules! kinds {
    ($($kind:ident = $number:literal, $name:literal;)*) => {
        /// A kind of objects.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub(crate) enum Kind {
            $($kind = $number,)*
        }

        fn kind_name(kind: u8) -> Option<&'static str> {
            match kind {
                $($number => Some($name),)*
                _ => None,
            }
        }
    };
}

kinds! {
    Job = 1, "job";
    Comm = 2, "communicator";
    Window = 3, "window";
    Stream = 4, "stream";
    Module = 5, "module";
    Kernel = 6, "kernel";
    Graph = 7, "graph";
    EpGroup = 8, "group";
    EpSlot = 9, "slot";
    EpPlan = 10, "plan";
    EpPermuted = 11, "layout";
    EpGrouped = 12, "grouped product";
    EpOverlapped = 13, "overlapped product";
}

/// The type of the objects of a kind.
pub(crate) trait Handled: Any + Send + Sync {
    const KIND: Kind;
}

/// An object of any kind.
pub(crate) type Object = Arc<dyn Any + Send + Sync>;

fn name<T: Handled>() -> &'static str {
    kind_name(T::KIND as u8).unwrap_or_default()
}

struct Place {
    generation: u32,
    object: Option<Object>,
}

#[derive(Default)]
struct Table {
    places: Vec<Place>,
    free: Vec<usize>,
}

static TABLE: LazyLock<Mutex<Table>> = LazyLock::new(Mutex::default);

/// The first generation of each place.
static FIRST: LazyLock<u32> = LazyLock::new(|| RandomState::new().build_hasher().finish() as u32 | 1);

fn handle(generation: u32, place: usize, kind: u8) -> u64 {
    u64::from(generation) << 32 | (place as u64) << 8 | u64::from(kind)
}

/// Adds an object, and returns its handle.
pub(crate) fn insert<T: Handled>(object: Arc<T>) -> Result<u64, Failure> {
    let mut table = lock(&TABLE);
    let place = match table.free.pop() {
        Some(place) => place,
        None if table.places.len() == PLACES => {
            return Err(Failure::new(GIN_ERROR_MEMORY, format!("there are {PLACES} open handles: close some")));
        }
        None => {
            table.places.push(Place { generation: *FIRST, object: None });
            table.places.len() - 1
        }
    };
    table.places[place].object = Some(object);
    Ok(handle(table.places[place].generation, place, T::KIND as u8))
}

fn find<T: Handled>(table: &mut Table, id: u64) -> Result<&mut Place, Failure> {
    let refuse = |reason: String| Err(Failure::new(GIN_ERROR_HANDLE, reason));
    if id == 0 {
        return refuse(format!("the {} is null: create it first", name::<T>()));
    }
    match kind_name(id as u8) {
        Some(other) if other != name::<T>() => {
            return refuse(format!("handle {id:#x} is a {other}, not a {}", name::<T>()));
        }
        _ => {}
    }
    let place = (id >> 8) as usize & (PLACES - 1);
    match table.places.get_mut(place) {
        Some(found)
            if handle(found.generation, place, T::KIND as u8) == id
                && found.object.as_ref().is_some_and(|object| object.is::<T>()) =>
        {
            Ok(found)
        }
        _ => refuse(format!("{} {id:#x} is closed, or of another process", name::<T>())),
    }
}

/// Returns the object of a handle.
pub(crate) fn get<T: Handled>(id: u64) -> Result<Arc<T>, Failure> {
    let mut table = lock(&TABLE);
    let place = find::<T>(&mut table, id)?;
    match place.object.clone().and_then(|object| object.downcast().ok()) {
        Some(object) => Ok(object),
        None => Err(Failure::new(GIN_ERROR_HANDLE, format!("{} {id:#x} is closed", name::<T>()))),
    }
}

/// Takes an object out of the table. The caller drops it, so its end does not hold the table.
pub(crate) fn remove<T: Handled>(id: u64) -> Result<Option<Object>, Failure> {
    let mut table = lock(&TABLE);
    let place = find::<T>(&mut table, id)?;
    let object = place.object.take();
    // 0 is no generation, so that no handle is null.
    place.generation = place.generation.wrapping_add(1).max(1);
    table.free.push((id >> 8) as usize & (PLACES - 1));
    Ok(object)
}

/// Returns whether an object of this type has a property.
pub(crate) fn any<T: Handled>(mut has: impl FnMut(&T) -> bool) -> bool {
    let of = |place: &Place| place.object.clone()?.downcast::<T>().ok();
    let objects: Vec<Arc<T>> = lock(&TABLE).places.iter().filter_map(of).collect();
    objects.iter().any(|object| has(object))
}
