// SPDX-License-Identifier: MIT OR Apache-2.0
//! The reasons why the firmware refuses a command.

use gin_abi::mlx5::command::Status;
use gin_nic::hca::HcaError;

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

    pub(crate) fn status(self) -> Status {
        REASONS[self as usize].0
    }

    pub(crate) fn syndrome(self) -> u32 {
        SYNDROMES + self as u32
    }
}

impl From<Reason> for HcaError {
    fn from(reason: Reason) -> Self {
        Self::Refused { status: reason.status() as u8, syndrome: reason.syndrome() }
    }
}

pub(crate) type Answer<T> = Result<T, Reason>;
