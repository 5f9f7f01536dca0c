// SPDX-License-Identifier: MIT OR Apache-2.0
//! Mistakes that a proxy can be told to make, for proving that tests notice them.

/// A mistake that the proxy makes on purpose.
#[doc(hidden)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
pub enum Sabotage {
    /// None.
    #[default]
    None,
    /// The signal of a put goes out before its payload.
    SignalBeforePayload,
    /// Every third put loses its payload; its signal is raised.
    LosePut,
    /// Every third signal is raised twice.
    RaiseTwice,
    /// A request is finished for flushes and tokens as soon as it is taken; its counter waits.
    FlushEarly,
    /// The counter is raised as soon as the request is taken.
    CountBeforeSource,
    /// A reset of a signal is turned into a store of 0 to its word, which lands late.
    ResetByStore,
    /// What arrives is never made visible.
    DropMakeVisible,
}

impl Sabotage {
    /// All mistakes.
    pub const ALL: [Self; 7] = [
        Self::SignalBeforePayload,
        Self::LosePut,
        Self::RaiseTwice,
        Self::FlushEarly,
        Self::CountBeforeSource,
        Self::ResetByStore,
        Self::DropMakeVisible,
    ];
}
