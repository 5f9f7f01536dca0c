// SPDX-License-Identifier: MIT OR Apache-2.0
//! Execution of commands, as by firmware.

mod make;
mod query;
mod states;

use super::objects::{HcaState, Kind, Name};
use super::{SoftConfig, SoftPort};
use gin_abi::mlx5::bits::{Layout, Mailbox, RowKind, View};
use gin_abi::mlx5::command::{Status, opcode};
use gin_abi::mlx5::mailbox::{CommandIn, CommandOut, QueryCqIn, QueryHcaCapIn, QueryQpIn, TABLES};
use gin_nic::hca::{Handle, HcaError};

/// The syndrome of the first [`Reason`]. Syndromes of a real NIC look different.
const SYNDROMES: u32 = 0x50f7_0000;

macro_rules! reasons {
    ($($variant:ident = $status:ident, $text:literal;)*) => {
        /// The reason why a command is refused.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub(crate) enum Reason { $($variant,)* }

        /// Status and meaning of each reason.
        const REASONS: &[(Status, &str)] = &[$((Status::$status, $text),)*];
    };
}

reasons! {
    Operation = BadOperation, "no such command, or not here";
    Variant = BadOperation, "no such variant of the command";
    InputLength = BadInputLength, "wrong length of the command";
    OutputLength = BadOutputLength, "too little room for the answer";
    Reserved = BadParameter, "a reserved bit is set";
    Full = NoResources, "too many objects";
    Engine = Internal, "the engine has failed";
    WrongObject = BadResource, "no such object, or of another kind";
    InUse = ResourceBusy, "object is in use";
    Access = BadParameter, "rights that do not go together";
    UmemMissing = BadParameter, "no memory named for the ring or the record";
    UmemUnknown = BadResource, "no such memory";
    UmemReadOnly = BadParameter, "memory that the NIC may not write";
    UmemRange = BadParameter, "ring or record reaches past its memory";
    Alignment = BadParameter, "ring or record is not aligned";
    EntrySize = BadParameter, "size of entries";
    QueueSize = Limit, "size of the queue";
    Uar = BadResource, "no such doorbell page";
    UarShared = ResourceBusy, "doorbell page serves another queue pair";
    EventQueue = BadResource, "no such event queue";
    Overrun = BadParameter, "overruns cannot be ignored";
    Service = BadParameter, "kind of service";
    ReceiveQueue = BadParameter, "receive queues are not there";
    DoorbellMode = BadParameter, "send queues need doorbell records";
    Domain = BadResource, "no such protection domain";
    CompletionQueue = BadResource, "no such completion queue";
    CoreDirect = BadParameter, "entries cannot wait for completion queues";
    State = BadQpState, "queue pair is in another state";
    Port = BadParameter, "no such port";
    Path = BadParameter, "state of path migration";
    PartitionKey = Index, "no such partition key";
    Atomics = BadParameter, "atomics that the NIC does not have";
    Mtu = BadParameter, "no such MTU";
    Message = BadParameter, "longest message";
    Reads = Limit, "reads and atomics under way";
    GidIndex = Index, "no such GID";
    UdpPort = BadParameter, "UDP source port out of range";
    Hops = BadParameter, "no hops";
    Lid = BadParameter, "no such local identifier";
    Header = BadParameter, "global route header on Ethernet";
    Optional = BadParameter, "optional fields that this change does not take";
}

/// Returns the meaning of a syndrome of a software NIC.
pub fn reason(syndrome: u32) -> Option<&'static str> {
    let number = syndrome.checked_sub(SYNDROMES)?;
    REASONS.get(number as usize).map(|(_, text)| *text)
}

impl Reason {
    pub(crate) fn refuse_if(self, wrong: bool) -> Answer<()> {
        if wrong { Err(self) } else { Ok(()) }
    }

    fn status(self) -> Status {
        REASONS[self as usize].0
    }

    fn syndrome(self) -> u32 {
        SYNDROMES + self as u32
    }
}

impl From<Reason> for HcaError {
    fn from(reason: Reason) -> Self {
        Self::Refused { status: reason.status() as u8, syndrome: reason.syndrome() }
    }
}

pub(crate) type Answer<T> = Result<T, Reason>;

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
