// SPDX-License-Identifier: MIT OR Apache-2.0
//! Execution of commands, as by firmware.

mod make;
mod query;
mod states;

use super::objects::{HcaState, Kind, Name};
use super::reason::{Answer, Reason};
use super::{SoftConfig, SoftPort};
use gin_abi::mlx5::bits::{Layout, Mailbox, RowKind, View};
use gin_abi::mlx5::command::opcode;
use gin_abi::mlx5::mailbox::{CommandIn, CommandOut, QueryCqIn, QueryHcaCapIn, QueryQpIn, TABLES};
use gin_nic::hca::{Handle, HcaError};

/// Executes a command about the object, or about none. Returns the handle of a created object.
pub(super) fn execute(
    state: &mut HcaState,
    device: u32,
    object: Option<Handle>,
    input: &[u8],
    output: &mut [u8],
) -> Result<Option<Handle>, HcaError> {
    let about = match object {
        None => None,
        Some(handle) => Some((handle, state.find(handle, device)?.name)),
    };
    if state.kernel.is_none() {
        // A doorbell that rang before a command refers to the objects of that time. A kernel looks before it parks.
        state.look_at_doorbells();
    }
    output.fill(0);
    dispatch(state, device, about, input, output).map_err(|reason| {
        // Without room for an answer, only the error is returned.
        let _ = reply::<CommandOut>(output, |answer| {
            answer.set(CommandOut::STATUS, reason.status().code()).set(CommandOut::SYNDROME, reason.syndrome().into());
            Ok(())
        });
        reason.into()
    })
}

fn dispatch(
    state: &mut HcaState,
    device: u32,
    about: Option<(Handle, Name)>,
    input: &[u8],
    output: &mut [u8],
) -> Answer<Option<Handle>> {
    let head = View::<CommandIn>::new(input).ok_or(Reason::InputLength)?;
    Reason::OutputLength.refuse_if(output.len() < CommandOut::LENGTH)?;
    let code = head.get(CommandIn::OPCODE);
    let Some((handle, (kind, number))) = about else {
        let config = state.config(device);
        let made = match code {
            opcode::QUERY_HCA_CAP => {
                ask(input, output, |command, answer| query::capabilities(config, command, answer))?;
                return Ok(None);
            }
            opcode::QUERY_ROCE_ADDRESS => {
                ask(input, output, |command, answer| query::address(config, command, answer))?;
                return Ok(None);
            }
            opcode::CREATE_CQ => make::create_completions(state, device, parse(input)?)?,
            opcode::CREATE_QP => make::create_queue(state, device, parse(input)?)?,
            _ => return Err(Reason::Operation),
        };
        let number = made.name.1;
        reply::<CommandOut>(output, |answer| {
            answer.set(CommandOut::NUMBER, number.into());
            Ok(())
        })?;
        return Ok(Some(state.keep(made)));
    };
    Reason::WrongObject.refuse_if(u64::from(number) != head.get(CommandIn::NUMBER))?;
    let about = |wanted| Reason::WrongObject.refuse_if(kind != wanted).map(|()| number as usize);
    match code {
        opcode::RST2INIT_QP | opcode::INIT2RTR_QP | opcode::RTR2RTS_QP => {
            states::change(state, about(Kind::Queue)?, parse(input)?)?;
        }
        opcode::TO_ERR_QP | opcode::TO_RST_QP => {
            states::stop(&mut state.queues[about(Kind::Queue)?], parse(input)?)?;
        }
        opcode::QUERY_QP => {
            let queue = &state.queues[about(Kind::Queue)?];
            ask::<QueryQpIn, _>(input, output, |_, answer| query::queue(queue, answer))?;
        }
        opcode::QUERY_CQ => {
            let queue = &state.completions[about(Kind::Completions)?];
            ask::<QueryCqIn, _>(input, output, |_, answer| query::completions(queue, answer))?;
        }
        opcode::DESTROY_QP => state.end(handle, Kind::Queue)?,
        opcode::DESTROY_CQ => state.end(handle, Kind::Completions)?,
        opcode::DESTROY_UMEM => state.end(handle, Kind::Umem)?,
        opcode::DEALLOC_UAR => state.end(handle, Kind::Uar)?,
        _ => return Err(Reason::Operation),
    }
    Ok(None)
}

/// Checks that a command has its exact length, and no unknown field that is not zero.
fn parse<L: Layout>(input: &[u8]) -> Answer<View<'_, L>> {
    let view = View::new(input).filter(|_| input.len() == L::LENGTH).ok_or(Reason::InputLength)?;
    let mut left = input.to_vec();
    clear(L::NAME, &mut left);
    Reason::Reserved.refuse_if(left.iter().any(|&byte| byte != 0))?;
    // The variant is at the same offset in all commands.
    let head = View::<CommandIn>::new(input).map_or(0, |head| head.get(CommandIn::OP_MOD));
    Reason::Variant.refuse_if(head != 0 && L::NAME != QueryHcaCapIn::NAME)?;
    Ok(view)
}

/// Clears the fields that a table knows.
fn clear(table: &str, bytes: &mut [u8]) {
    for row in TABLES.iter().filter(|known| known.name == table).flat_map(|table| table.rows) {
        let place = row.offset as usize / 8;
        let within = place..place + row.width as usize / 8;
        match row.kind {
            RowKind::Number => row.set(bytes, 0),
            RowKind::Bytes => bytes[within].fill(0),
            RowKind::Part(part) => clear(part, &mut bytes[within]),
        }
    }
}

/// Executes a command and fills its answer, for which there must be room.
fn ask<I: Layout, O: Layout>(
    input: &[u8],
    output: &mut [u8],
    fill: impl FnOnce(View<'_, I>, &mut Mailbox<O>) -> Answer<()>,
) -> Answer<()> {
    let command = parse(input)?;
    reply(output, |answer| fill(command, answer))
}

fn reply<L: Layout>(output: &mut [u8], fill: impl FnOnce(&mut Mailbox<L>) -> Answer<()>) -> Answer<()> {
    let place = output.get_mut(..L::LENGTH).ok_or(Reason::OutputLength)?;
    let mut answer = Mailbox::new();
    fill(&mut answer)?;
    place.copy_from_slice(answer.view().bytes());
    Ok(())
}

fn port_of(config: &SoftConfig, port: u64) -> Answer<&SoftPort> {
    config.port(port).ok_or(Reason::Port)
}
