// SPDX-License-Identifier: MIT OR Apache-2.0
//! Execution of commands, as by firmware.

mod make;
mod query;
mod states;

use super::objects::{HcaState, Kind, Object, remove};
use super::{SoftConfig, SoftPort};
use gin_abi::mlx5::bits::{Field, Layout, Mailbox, RowKind, View};
use gin_abi::mlx5::command::{Status, opcode};
use gin_abi::mlx5::mailbox::{CommandIn, CommandOut, QueryHcaCapIn, TABLES};
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
    Pages = BadParameter, "pages that do not follow each other";
    PageOffset = BadParameter, "offset past the first page";
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
    object: Option<Object>,
    input: &[u8],
    output: &mut [u8],
) -> Result<Option<Handle>, HcaError> {
    if !state.is_kernel() {
        // A doorbell that rang before a command refers to the objects of that time. A kernel looks before it parks.
        state.look_at_doorbells();
    }
    output.fill(0);
    let done = dispatch(state, device, object, input, output);
    done.map(|made| made.map(|made| state.keep(made))).map_err(|reason| {
        if let Some(head) = output.get_mut(..CommandOut::LENGTH) {
            let mut answer = Mailbox::<CommandOut>::new();
            answer.set(CommandOut::STATUS, reason.status().code()).set(CommandOut::SYNDROME, reason.syndrome().into());
            head.copy_from_slice(answer.view().bytes());
        }
        reason.into()
    })
}

fn dispatch(
    state: &mut HcaState,
    device: u32,
    object: Option<Object>,
    input: &[u8],
    output: &mut [u8],
) -> Answer<Option<Object>> {
    let head = View::<CommandIn>::new(input).ok_or(Reason::InputLength)?;
    Reason::OutputLength.refuse_if(output.len() < CommandOut::LENGTH)?;
    let code = head.get(CommandIn::OPCODE);
    let made = |kind, number| Ok(Some(Object { kind, device, number }));
    let about = |kind| match object {
        Some(object) if object.kind == kind => Ok(object.number),
        _ => Err(Reason::WrongObject),
    };
    if object.is_none() {
        return match code {
            opcode::QUERY_HCA_CAP => {
                query::query_capabilities(state.config(device), parse(input)?, output).map(|()| None)
            }
            opcode::QUERY_ROCE_ADDRESS => {
                query::query_address(state.config(device), parse(input)?, output).map(|()| None)
            }
            opcode::CREATE_CQ => {
                made(Kind::Completions, make::create_completions(state, device, parse(input)?, output)?)
            }
            opcode::CREATE_QP => made(Kind::Queue, make::create_queue(state, device, parse(input)?, output)?),
            opcode::CREATE_UMEM => made(Kind::Umem, make::create_umem(state, device, input, output)?),
            opcode::ALLOC_UAR => made(Kind::Uar, make::allocate_uar(state, device, parse(input)?, output)?),
            _ => Err(Reason::Operation),
        };
    }
    let number = head.get(CommandIn::NUMBER) as u32;
    Reason::WrongObject.refuse_if(object.is_some_and(|object| object.number != number))?;
    match code {
        opcode::RST2INIT_QP => states::to_init(state, about(Kind::Queue)?, parse(input)?),
        opcode::INIT2RTR_QP => states::to_ready_to_receive(state, about(Kind::Queue)?, parse(input)?),
        opcode::RTR2RTS_QP => states::to_ready_to_send(state, about(Kind::Queue)?, parse(input)?),
        opcode::TO_ERR_QP | opcode::TO_RST_QP => states::stop(state, about(Kind::Queue)?, parse(input)?),
        opcode::QUERY_QP => query::query_queue(state, about(Kind::Queue)?, parse(input)?, output),
        opcode::QUERY_CQ => query::query_completions(state, about(Kind::Completions)?, parse(input)?, output),
        opcode::DESTROY_QP => make::destroy_queue(state, about(Kind::Queue)?),
        opcode::DESTROY_CQ => make::destroy_completions(state, about(Kind::Completions)?),
        opcode::DESTROY_UMEM => remove(&mut state.umems, about(Kind::Umem)?),
        opcode::DEALLOC_UAR => remove(&mut state.uars, about(Kind::Uar)?),
        _ => Err(Reason::Operation),
    }
    .map(|()| None)
}

/// Checks that a command has its exact length, and no unknown field that is not zero.
fn parse<L: Layout>(input: &[u8]) -> Answer<View<'_, L>> {
    Reason::InputLength.refuse_if(input.len() != L::LENGTH)?;
    let view = View::new(input).ok_or(Reason::InputLength)?;
    check_reserved::<L>(input)?;
    // The variant is at the same offset in all commands.
    let head = View::<CommandIn>::new(input).map_or(0, |head| head.get(CommandIn::OP_MOD));
    Reason::Variant.refuse_if(head != 0 && L::NAME != QueryHcaCapIn::NAME)?;
    Ok(view)
}

fn check_reserved<L: Layout>(input: &[u8]) -> Answer<()> {
    let mut left = input[..L::LENGTH].to_vec();
    clear(L::NAME, &mut left);
    Reason::Reserved.refuse_if(left.iter().any(|&byte| byte != 0))
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

fn room<L: Layout>(output: &[u8]) -> Answer<()> {
    Reason::OutputLength.refuse_if(output.len() < L::LENGTH)
}

fn reply<L: Layout>(output: &mut [u8], answer: &Mailbox<L>) {
    output[..L::LENGTH].copy_from_slice(answer.view().bytes());
}

fn reply_number<L: Layout>(output: &mut [u8], field: Field<L>, number: u32) {
    let mut answer = Mailbox::<L>::new();
    answer.set(field, number.into());
    reply(output, &answer);
}

fn port_of(config: &SoftConfig, port: u64) -> Answer<&SoftPort> {
    let found = usize::try_from(port).ok().and_then(|port| config.ports.get(port.wrapping_sub(1)));
    found.ok_or(Reason::Port)
}
