// SPDX-License-Identifier: MIT OR Apache-2.0
//! Arguments of a launch: Python values as the parameters that a kernel takes.

use crate::comm::Communicator;
use crate::deadline::Deadline;
use crate::dtype::Typed;
use crate::ep;
use crate::error::{OrRaise, Raised};
use crate::member::Member;
use crate::region::Users;
use crate::tensor::Tensor;
use crate::window::Window;
use crate::work::{Held, check_device};
use gin_gpu::{Argument, Device, Function, GpuError, KernelArg, Parameter};
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::any::TypeId;
use std::sync::Arc;

/// The arguments of a launch.
#[derive(Debug, Default)]
pub(crate) struct Arguments {
    pub(crate) values: Vec<Argument>,
    pub(crate) held: Vec<Held>,
    /// The communicators among them, and those of the windows among them.
    pub(crate) members: Vec<Arc<Member>>,
    /// Those of the memory that the kernel uses.
    pub(crate) users: Vec<Arc<Users>>,
}

/// The place of an argument, for errors.
struct Place<'a> {
    kernel: &'a str,
    position: usize,
    parameter: &'a Parameter,
}

impl std::fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { kernel, position, parameter: Parameter { name, type_name, size, .. } } = self;
        write!(f, "parameter {position} of kernel `{kernel}`")?;
        if name.is_empty() { write!(f, " of {size} bytes") } else { write!(f, ", `{name}: {type_name}`") }
    }
}

impl Arguments {
    /// Makes the arguments of a launch on `device`.
    pub(crate) fn new(function: &Function, given: &Bound<'_, PyTuple>, device: &Arc<dyn Device>) -> PyResult<Self> {
        let Function { name: kernel, parameters, .. } = function;
        if given.len() != parameters.len() {
            let names: Vec<&str> = parameters.iter().map(|parameter| parameter.name.as_str()).collect();
            let (expected, names) = (parameters.len(), names.join(", "));
            let error = GpuError::ParameterCount { kernel: kernel.clone(), expected, given: given.len(), names };
            return Err(error.raised(given.py()));
        }
        let mut arguments = Self::default();
        let (mut passed, mut windows, mut groups) = (Vec::new(), Vec::new(), Vec::new());
        for (position, (parameter, value)) in parameters.iter().zip(given).enumerate() {
            let place = Place { kernel, position, parameter };
            let (argument, given) = if let Ok(comm) = value.cast::<Communicator>() {
                let member = comm.get().member()?;
                check_device(format_args!("{place}: the value"), &**member.comm.gpu(), &**device)?;
                passed.push(member.clone());
                arguments.held.push(Held::Object(value.clone().unbind()));
                (member.comm.device().or_raise(value.py())?.argument(), "a communicator".to_owned())
            } else if let Ok(window) = value.cast::<Window>() {
                let part = window.get().part()?;
                check_device(format_args!("{place}: the value"), &**part.member.comm.gpu(), &**device)?;
                windows.push((position, part.member.clone()));
                arguments.users.push(part.users.clone());
                arguments.held.push(Held::Object(value.clone().unbind()));
                let dtype = part.region.dtype;
                ((dtype.typed().window)(part.window.handle()), format!("a window of {}", dtype.name()))
            } else if let Some(rows) = ep::Rows::of(&value)? {
                check_device(format_args!("{place}: the value"), &**rows.member.comm.gpu(), &**device)?;
                groups.push(rows.member);
                arguments.users.extend(rows.users);
                arguments.held.push(Held::Memory(rows.memory));
                (rows.argument, format!("a `gincomm.ep.{}`", value.get_type().name()?))
            } else if let Some(part) = ep::Part::of(&value)? {
                check_device(format_args!("{place}: the value"), &**part.member.comm.gpu(), &**device)?;
                groups.push(part.member);
                arguments.users.push(part.users);
                arguments.held.push(Held::Object(part.owner));
                (part.argument, format!("the parameter `{}` of `Slot.fuse`", part.name))
            } else if let Ok(deadline) = value.cast::<Deadline>() {
                (deadline.get().0.argument(), "a `gincomm.Deadline`".to_owned())
            } else if Tensor::is_offered_by(&value) && !is_scalar(parameter) {
                let tensor = Tensor::take(&value, &**device, &place.to_string(), &[])?;
                let argument = pointer(&place, &tensor)?;
                let given = format!("a tensor of {}", tensor.dtype.name());
                arguments.held.push(Held::Tensor(tensor));
                (argument, given)
            } else {
                (scalar(&place, &value)?, "a number".to_owned())
            };
            // The launch checks it, too, and would name types of Rust.
            if argument.bytes() != parameter.size || parameter.type_id.is_some_and(|id| id != argument.type_id()) {
                return Err(PyTypeError::new_err(format!("{place}: {given} was given")));
            }
            arguments.values.push(argument);
        }
        for (position, owner) in windows {
            if !passed.is_empty() && !passed.iter().any(|member| Arc::ptr_eq(member, &owner)) {
                let place = Place { kernel, position, parameter: &parameters[position] };
                let text = format!("{place}: the window belongs to another communicator than the kernel gets");
                return Err(PyValueError::new_err(text));
            }
            passed.push(owner);
        }
        passed.extend(groups);
        arguments.members = passed;
        Ok(arguments)
    }
}

/// Returns the address of a tensor as the parameter that the kernel takes.
fn pointer(place: &Place<'_>, tensor: &Tensor) -> PyResult<Argument> {
    let Typed { mutable, constant, .. } = tensor.dtype.typed();
    match place.parameter.type_id {
        Some(id) if id == constant.0 => Ok((constant.1)(tensor.address)),
        // The module does not tell types; the launch compares sizes.
        None => Ok((mutable.1)(tensor.address)),
        Some(id) if id == mutable.0 => Ok((mutable.1)(tensor.address)),
        Some(_) => {
            let text = format!("{place}: a tensor of {} was given", tensor.dtype.name());
            Err(PyTypeError::new_err(text))
        }
    }
}

/// Returns the error of a value that does not fit a parameter.
fn misfit(place: &Place<'_>, value: &Bound<'_, PyAny>, cause: &PyErr) -> PyErr {
    let (shown, kind) = (value.repr().map_or_else(|_| "?".to_owned(), |text| text.to_string()), value.get_type());
    let kind = kind.name().map_or_else(|_| "?".to_owned(), |name| name.to_string());
    let text = format!("{place}: {shown} of type `{kind}` does not fit");
    match cause.is_instance_of::<PyOverflowError>(value.py()) {
        true => PyOverflowError::new_err(text),
        false => PyTypeError::new_err(text),
    }
}

macro_rules! numbers {
    ($place:ident, $value:ident, $id:ident: $($ty:ty),*) => { $(
        if $id == TypeId::of::<$ty>() {
            let number: $ty = $value.extract().map_err(|error| misfit($place, $value, &error))?;
            return Ok(number.argument());
        }
    )* };
}

/// Returns whether a parameter is known to be a number.
fn is_scalar(parameter: &Parameter) -> bool {
    macro_rules! any {
        ($($ty:ty),*) => { [$(TypeId::of::<$ty>()),*] };
    }
    let scalars = any!(bool, u8, i8, u16, i16, u32, i32, u64, i64, usize, isize, f32, f64);
    parameter.type_id.is_some_and(|id| scalars.contains(&id))
}

/// Returns a number as the parameter that the kernel takes.
fn scalar(place: &Place<'_>, value: &Bound<'_, PyAny>) -> PyResult<Argument> {
    let Some(id) = place.parameter.type_id else { return untyped(place, value) };
    numbers!(place, value, id: u8, i8, u16, i16, u32, i32, u64, i64, usize, isize, f32, f64);
    if id == TypeId::of::<bool>() {
        let flag: bool = value.extract().map_err(|error| misfit(place, value, &error))?;
        return Ok(Argument::of::<bool>(u8::from(flag)));
    }
    let advice = "pass gincomm.Communicator for `Comm`, gincomm.Window for `Window`, gincomm.Deadline for `Deadline`, \
                  a tensor for a pointer, a number for a number, gincomm.ep.Received and gincomm.ep.PermutedRows for rows, \
                  and what gincomm.ep.Slot.fuse returns for its parameters; parameters of other types cannot be passed \
                  from Python";
    let kind = value.get_type().name()?;
    Err(PyTypeError::new_err(format!("{place}: a `{kind}` was given; {advice}")))
}

/// Returns a number for a parameter of which only the size is known: an integer, or a float of 4 or 8 bytes.
fn untyped(place: &Place<'_>, value: &Bound<'_, PyAny>) -> PyResult<Argument> {
    let size = place.parameter.size;
    if value.hasattr("__index__")? {
        let number: i128 = value.extract().map_err(|error| misfit(place, value, &error))?;
        let bits = 8 * size as u32;
        if [1, 2, 4, 8].contains(&size) && (-(1_i128 << (bits - 1))..1_i128 << bits).contains(&number) {
            return Ok(match size {
                1 => (number as u8).argument(),
                2 => (number as u16).argument(),
                4 => (number as u32).argument(),
                _ => (number as u64).argument(),
            });
        }
        return Err(PyOverflowError::new_err(format!("{place}: {number} does not fit")));
    }
    let number: f64 = value.extract().map_err(|error| misfit(place, value, &error))?;
    match size {
        4 => Ok((number as f32).argument()),
        8 => Ok(number.argument()),
        _ => Err(PyTypeError::new_err(format!("{place}: a float has 4 or 8 bytes"))),
    }
}
