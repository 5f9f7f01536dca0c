// SPDX-License-Identifier: MIT OR Apache-2.0
//! The objects behind handles.
//!
//! A handle is a number: generation, place and kind. A place has a new generation after each object, and generations of
//! a process begin at a random number. So a closed handle, or one of another process, finds no object.

use crate::status::Failure;
use crate::types::gin_status_t::{GIN_ERROR_HANDLE, GIN_ERROR_MEMORY};
use crate::{comm, ep, graph, job, launch, window};
use gin_boot::lock;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::{Arc, LazyLock, Mutex};

/// The maximum number of objects at a time.
const PLACES: usize = 1 << 24;

/// A type of objects.
pub(crate) trait Kind: Sized {
    const KIND: u8;
    const NAME: &'static str;
    fn wrap(this: Arc<Self>) -> Object;
    fn of(object: &Object) -> Option<&Arc<Self>>;
}

macro_rules! kinds {
    ($($kind:ident($ty:ty) = $number:literal, $name:literal;)*) => {
        /// An object of any kind.
        #[derive(Clone)]
        pub(crate) enum Object {
            $($kind(Arc<$ty>),)*
        }

        $(
            impl Kind for $ty {
                const KIND: u8 = $number;
                const NAME: &'static str = $name;

                fn wrap(this: Arc<Self>) -> Object {
                    Object::$kind(this)
                }

                fn of(object: &Object) -> Option<&Arc<Self>> {
                    match object {
                        Object::$kind(this) => Some(this),
                        _ => None,
                    }
                }
            }
        )*

        fn kind_name(kind: u8) -> Option<&'static str> {
            match kind {
                $($number => Some($name),)*
                _ => None,
            }
        }
    };
}

kinds! {
    Job(job::Job) = 1, "job";
    Comm(comm::Comm) = 2, "communicator";
    Window(window::Window) = 3, "window";
    Stream(launch::Stream) = 4, "stream";
    Module(launch::Module) = 5, "module";
    Kernel(launch::Kernel) = 6, "kernel";
    Graph(graph::Graph) = 7, "graph";
    EpGroup(ep::group::Group) = 8, "group";
    EpSlot(ep::slot::Slot) = 9, "slot";
    EpPlan(ep::permuted::Plan) = 10, "plan";
    EpPermuted(ep::permuted::Permuted) = 11, "layout";
    EpGrouped(ep::product::Grouped) = 12, "grouped product";
    EpOverlapped(ep::product::Overlapped) = 13, "overlapped product";
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
pub(crate) fn insert<T: Kind>(object: Arc<T>) -> Result<u64, Failure> {
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
    table.places[place].object = Some(T::wrap(object));
    Ok(handle(table.places[place].generation, place, T::KIND))
}

fn find<T: Kind>(table: &mut Table, id: u64) -> Result<&mut Place, Failure> {
    let refuse = |reason: String| Err(Failure::new(GIN_ERROR_HANDLE, reason));
    if id == 0 {
        return refuse(format!("the {} is null: create it first", T::NAME));
    }
    match kind_name(id as u8) {
        Some(name) if name != T::NAME => return refuse(format!("handle {id:#x} is a {name}, not a {}", T::NAME)),
        _ => {}
    }
    let place = (id >> 8) as usize & (PLACES - 1);
    match table.places.get_mut(place) {
        Some(found)
            if handle(found.generation, place, T::KIND) == id
                && found.object.as_ref().is_some_and(|o| T::of(o).is_some()) =>
        {
            Ok(found)
        }
        _ => refuse(format!("{} {id:#x} is closed, or of another process", T::NAME)),
    }
}

/// Returns the object of a handle.
pub(crate) fn get<T: Kind>(id: u64) -> Result<Arc<T>, Failure> {
    let mut table = lock(&TABLE);
    let place = find::<T>(&mut table, id)?;
    match place.object.as_ref().and_then(T::of) {
        Some(object) => Ok(object.clone()),
        None => Err(Failure::new(GIN_ERROR_HANDLE, format!("{} {id:#x} is closed", T::NAME))),
    }
}

/// Takes an object out of the table. The caller drops it, so its end does not hold the table.
pub(crate) fn remove<T: Kind>(id: u64) -> Result<Option<Object>, Failure> {
    let mut table = lock(&TABLE);
    let place = find::<T>(&mut table, id)?;
    let object = place.object.take();
    // 0 is no generation, so that no handle is null.
    place.generation = place.generation.wrapping_add(1).max(1);
    table.free.push((id >> 8) as usize & (PLACES - 1));
    Ok(object)
}

/// Returns whether an object of this type has a property.
pub(crate) fn any<T: Kind>(mut has: impl FnMut(&T) -> bool) -> bool {
    let objects: Vec<Arc<T>> =
        lock(&TABLE).places.iter().filter_map(|place| place.object.as_ref().and_then(T::of)).cloned().collect();
    objects.iter().any(|object| has(object))
}
