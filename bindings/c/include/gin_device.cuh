// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The device API of gin for CUDA C++17, and for C++ kernels on the virtual GPU.
//
// Thin classes over the functions of bindings/c/device, which `libgin_device.a` has for GPUs and `libgin` for CPUs. Names
// and the order of arguments are those of NCCL's ncclGin; docs/c.md has the table of what becomes what. Every call that
// can fail returns a gin::Fault. Offsets and lengths are in bytes, unless an argument says elements.
//
// What is small is code of this header: teams, ranges, pointers to memory of LSA peers; in gin_inline.cuh, reads of the
// own signals and counters, the first polls of waits for them, and put, putValue and signal to peers that loads and
// stores reach. Other operations, the rest of waits, and barriers are calls: gin_calls.cuh. docs/c.md states what a
// call costs.

#pragma once

#include "gin.h"

#include <cstddef>
#include <cstdint>
#include <type_traits>

// Macros of the program with names of this header, such as X11's. The end of the header restores them.
#pragma push_macro("None")
#pragma push_macro("check")
#pragma push_macro("near")
#undef None
#undef check
#undef near

#if defined(__CUDACC__)
#define GIN_FN __device__ __forceinline__
#define GIN_BOTH __host__ __device__ __forceinline__
#define GIN_CALL __device__
/// Marks a kernel: `GIN_KERNEL void name(...)`. Without a CUDA compiler, a function for the virtual GPU.
#define GIN_KERNEL __global__
#else
#define GIN_FN inline
#define GIN_BOTH inline
#define GIN_CALL
#define GIN_KERNEL inline
#endif

#include "gin_calls.cuh"

namespace gin {

/// The kinds of faults.
enum class FaultKind : uint32_t {
    None = 0,
    Timeout = 1,
    Aborted = 2,
    PeerLost = 3,
    Network = 4,
    QueueBroken = 5,
    UnknownRank = 6,
    NotInTeam = 7,
    OutOfRange = 8,
    Misaligned = 9,
    LengthMismatch = 10,
    UnknownSignal = 11,
    UnknownCounter = 12,
    UnknownContext = 13,
    UnknownWindow = 14,
    UnknownBarrier = 15,
    NoStrongSignals = 16,
    NoVaSignals = 17,
    BadWidth = 18,
    BarrierBroken = 19,
    BadDescriptor = 20,
    NoBackend = 21,
    AbiMismatch = 22,
    Reported = 23,
    NotReachable = 24,
    Elsewhere = 25,
    NotConnected = 26,
};

/// The outcome of a call: true if it failed.
class [[nodiscard]] Fault {
public:
    GIN_FN explicit Fault(uint64_t word = 0) : word_(word) {}
    GIN_FN explicit Fault(FaultKind kind, uint32_t operation = 0, uint32_t context = 0x1ff, uint32_t peer = 0x1ffffff)
        : word_(static_cast<uint64_t>(kind) | operation << 6 | uint64_t{context < 0x1ff ? context : 0x1ff} << 10 |
                uint64_t{peer < 0x1ffffff ? peer : 0x1ffffff} << 19) {}
    GIN_FN explicit operator bool() const { return word_ != 0; }
    GIN_FN FaultKind kind() const { return static_cast<FaultKind>(word_ & 63); }
    /// Returns the context, GIN_NONE if there is none.
    GIN_FN uint32_t context() const { return (word_ >> 10 & 0x1ff) == 0x1ff ? GIN_NONE : word_ >> 10 & 0x1ff; }
    /// Returns the world rank of the peer, GIN_NONE if there is none.
    GIN_FN uint32_t peer() const { return (word_ >> 19 & 0x1ffffff) == 0x1ffffff ? GIN_NONE : word_ >> 19 & 0x1ffffff; }
    GIN_FN uint64_t word() const { return word_; }

private:
    uint64_t word_;
};

/// A value, or a fault.
template <class T>
struct [[nodiscard]] Result {
    T value;
    Fault fault;
    GIN_FN explicit operator bool() const { return !fault; }
};

/// The time limit of a wait, from its start.
struct Deadline {
    uint64_t ns;
    GIN_BOTH static constexpr Deadline none() { return {UINT64_MAX}; }
    GIN_BOTH static constexpr Deadline after_ns(uint64_t ns) { return {ns}; }
    GIN_BOTH static constexpr Deadline after_us(uint64_t us) { return {us * 1000}; }
    GIN_BOTH static constexpr Deadline after_ms(uint64_t ms) { return {ms * 1000000}; }
};

}  // namespace gin

#include "gin_coop.cuh"

namespace gin {

// ---- Communicators, teams, windows -------------------------------------------------------------------------------

/// A set of ranks: `nRanks` world ranks from `first` on, `stride` apart. `rank` is the caller's.
struct Team {
    uint32_t first, nRanks, rank, stride;
    /// Returns the world rank of a rank of the team; GIN_NONE, which every operation refuses, if there is none.
    GIN_FN uint32_t world(uint32_t peer) const { return peer < nRanks ? first + peer * stride : GIN_NONE; }
    /// Returns the team's rank `distance` ranks further on, in a circle.
    GIN_FN uint32_t after(uint32_t distance) const {
        if (distance >= nRanks) return (rank + distance) % nRanks;
        // Without a division.
        uint32_t next = rank + distance;
        return next < nRanks ? next : next - nRanks;
    }
};

/// A communicator: a parameter of kernels. The host's `gin_device_comm_t` becomes one.
class Comm {
public:
    Comm() = default;
    GIN_BOTH Comm(const gin_device_comm_t& handle) : handle_(handle) {}
    GIN_FN const gin_device_comm_t& handle() const { return handle_; }
    /// Returns whether header, library and host have the same layouts. Without that every operation is refused.
    GIN_FN bool matches() const {
#if defined(__CUDACC_RDC__)
        asm("" : : "l"(gin_abi_version));  // for nvlink; no instruction remains of it
#endif
        return handle_.abi == GIN_ABI_VERSION;
    }
    GIN_FN Team world() const { return {0, handle_.ranks, handle_.rank, 1}; }
    GIN_FN Team lsa() const { return {handle_.rank - handle_.lsa_rank, handle_.lsa_size, handle_.lsa_rank, 1}; }
    GIN_FN Team rail() const {
        return {handle_.lsa_rank, handle_.ranks / handle_.lsa_size, handle_.rank / handle_.lsa_size, handle_.lsa_size};
    }
    GIN_FN uint32_t rank() const { return handle_.rank; }
    GIN_FN uint32_t nRanks() const { return handle_.ranks; }
    GIN_FN uint32_t contexts() const { return handle_.contexts; }
    /// Reports a fault to the host, if there is one. It ends every wait, on all ranks.
    GIN_FN void report(Fault fault) const {
        if (fault) gin_report(handle_.copy, fault.word());
    }
    /// Reports an error of the kernel's own.
    GIN_FN void report(uint32_t code) const { gin_report_code(handle_.copy, code); }
    /// Returns the abort or fault of the communicator, if there is one.
    GIN_FN Fault fault() const { return Fault(gin_comm_fault_word(handle_.copy)); }

private:
    gin_device_comm_t handle_;
};

/// What `gin::HostWindow<T>::device` of gin.hpp returns.
template <class T>
struct DeviceWindow;

/// A window of elements of type `T`: a parameter of kernels. The host's `gin_device_window_t` becomes one.
template <class T>
class Window {
public:
    Window() = default;
    GIN_BOTH Window(const gin_device_window_t& handle) : handle_(handle) {}
    /// A window of other elements is refused.
    template <class U, class = std::enable_if_t<!std::is_same_v<T, U>>>
    Window(const DeviceWindow<U>& other) = delete;
    GIN_FN const gin_device_window_t& handle() const { return handle_; }
    /// Returns the number of elements of the caller's own part.
    GIN_FN std::size_t size() const { return handle_.own_length / sizeof(T); }
    /// Returns the caller's own part.
    GIN_FN T* localPointer(std::size_t element = 0) const {
        return reinterpret_cast<T*>(handle_.base + element * sizeof(T));
    }
    /// Returns whether elements `start` to `start + count` are in the caller's own part.
    GIN_FN bool holds(std::size_t start, std::size_t count) const { return start <= size() && count <= size() - start; }
    /// Returns the address at which this GPU loads and stores a team rank's part; null if it does not reach it.
    GIN_FN T* peerPointer(const Team& team, uint32_t peer, std::size_t element = 0) const {
        uint32_t rank = team.world(peer);
        if (rank == GIN_NONE) return nullptr;
        uint64_t base;
        if (rank - handle_.lsa_first < handle_.lsa_reach) {
            base = handle_.base + (static_cast<uint64_t>((rank - handle_.rank) * handle_.stride) << 32);
        } else {
            auto entry = reinterpret_cast<const gin_device_window_entry_t*>(handle_.data);
            base = entry->peers == 0 ? 0 : reinterpret_cast<const uint64_t*>(entry->peers)[rank];
            if (base == 0) return nullptr;
        }
        return reinterpret_cast<T*>(base + element * sizeof(T));
    }

private:
    gin_device_window_t handle_;
};

/// An element of a window, the same on all ranks.
template <class T>
struct SymPtr {
    Window<T> window;
    std::size_t element = 0;
    GIN_FN SymPtr operator+(std::size_t elements) const { return {window, element + elements}; }
    GIN_FN uint64_t offset() const { return element * sizeof(T); }
};

// ---- Actions and options -----------------------------------------------------------------------------------------

struct None {};
struct StrongSignalInc { uint32_t signal; };
struct WeakSignalInc { uint32_t signal; };
struct StrongSignalAdd { uint32_t signal; uint64_t value; };
struct WeakSignalAdd { uint32_t signal; uint64_t value; };
template <class T> struct StrongVASignalInc { Window<T> signalWindow; uint64_t signalOffset; };
template <class T> struct WeakVASignalInc { Window<T> signalWindow; uint64_t signalOffset; };
template <class T> struct StrongVASignalAdd { Window<T> signalWindow; uint64_t signalOffset; uint64_t value; };
template <class T> struct WeakVASignalAdd { Window<T> signalWindow; uint64_t signalOffset; uint64_t value; };
struct CounterInc { uint32_t counter; };

/// The scope to which a payload is released.
enum class Scope : uint32_t { Thread = 0, Block = 1, Device = 2, System = 3 };
/// The threads that use a context at the same time.
enum class Sharing : uint32_t { Gpu = 0, Cta = 1, Thread = 2 };
/// The route of operations.
enum class Route : uint32_t { Auto = 0, Lsa = 1, Network = 2 };
/// The memory that a wait or a read makes visible: that of the peer, or none yet.
enum class Order : uint32_t { Acquire = 0, Relaxed = 1 };
/// The operations that a barrier waits for, besides the ranks.
enum class Fence : uint32_t { None = 0, Put = 1, Get = 2, PutGet = 3 };
/// The ranks of a barrier.
enum class BarrierTeam : uint32_t { World = 0, Rail = 1, Lsa = 2 };
enum OptFlags : uint32_t { OptDefault = 0, OptAggregateRequests = 1 << 9 };

/// The engine that carries out operations: found at run time, or named.
struct Any {};
struct Proxy {};
struct Gdaki {};

namespace detail {

enum : uint32_t { Signal = 1 << 10, Weak = 1 << 11, Counter = 1 << 12, AllRoutes = 1 << 13, AllContexts = 1 << 14 };
enum : uint32_t { Look = 1 << 15 };

/// Returns the world rank of a rank of the team. If there is none, returns the given rank with bit 31, which every
/// operation refuses and names.
GIN_FN uint32_t member(const Team& team, uint32_t peer) {
    return peer < team.nRanks ? team.first + peer * team.stride : peer | 1u << 31;
}

struct Raise {
    uint32_t options;
    uint64_t window, signal, amount;
};

GIN_FN Raise raise(None) { return {0, 0, 0, 0}; }
GIN_FN Raise raise(StrongSignalInc a) { return {Signal, 0, a.signal, 1}; }
GIN_FN Raise raise(WeakSignalInc a) { return {Signal | Weak, 0, a.signal, 1}; }
GIN_FN Raise raise(StrongSignalAdd a) { return {Signal, 0, a.signal, a.value}; }
GIN_FN Raise raise(WeakSignalAdd a) { return {Signal | Weak, 0, a.signal, a.value}; }
template <class T>
GIN_FN Raise raise(const StrongVASignalInc<T>& a) {
    return {Signal, a.signalWindow.handle().data, a.signalOffset, 1};
}
template <class T>
GIN_FN Raise raise(const WeakVASignalInc<T>& a) {
    return {Signal | Weak, a.signalWindow.handle().data, a.signalOffset, 1};
}
template <class T>
GIN_FN Raise raise(const StrongVASignalAdd<T>& a) {
    return {Signal, a.signalWindow.handle().data, a.signalOffset, a.value};
}
template <class T>
GIN_FN Raise raise(const WeakVASignalAdd<T>& a) {
    return {Signal | Weak, a.signalWindow.handle().data, a.signalOffset, a.value};
}

GIN_FN uint32_t counter_bit(None) { return 0; }
GIN_FN uint32_t counter_bit(CounterInc) { return Counter; }
GIN_FN uint32_t counter_id(None) { return 0; }
GIN_FN uint32_t counter_id(CounterInc a) { return a.counter; }

GIN_FN uint32_t given(Scope scope) { return static_cast<uint32_t>(scope) << 5; }
GIN_FN uint32_t required(Scope scope) {
    return (scope == Scope::Device ? 0u : scope == Scope::System ? 3u : static_cast<uint32_t>(scope) + 1) << 7;
}

template <class T>
GIN_FN uint64_t bits_of(T value) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8 && (sizeof(T) & (sizeof(T) - 1)) == 0,
                  "a value has 1, 2, 4 or 8 bytes");
    uint64_t word = 0;
    __builtin_memcpy(&word, &value, sizeof(T));
    return word;
}

/// An action that raises a signal at an address of a window.
template <class Action>
inline constexpr bool at_window = false;
template <class T>
inline constexpr bool at_window<StrongVASignalInc<T>> = true;
template <class T>
inline constexpr bool at_window<WeakVASignalInc<T>> = true;
template <class T>
inline constexpr bool at_window<StrongVASignalAdd<T>> = true;
template <class T>
inline constexpr bool at_window<WeakVASignalAdd<T>> = true;

}  // namespace detail
}  // namespace gin

#include "gin_inline.cuh"

namespace gin {

/// The operations of a context up to a position, to one peer.
struct Request {
    uint64_t position = 0;
    uint32_t peer = GIN_NONE;
};

// Calls the function of a name for the back end.
#define GIN_FORM(name, ...) \
    [&] { \
        if constexpr (std::is_same_v<Backend, Proxy>) { \
            return name##_proxy(__VA_ARGS__); \
        } else if constexpr (std::is_same_v<Backend, Gdaki>) { \
            return name##_gdaki(__VA_ARGS__); \
        } else { \
            return name(__VA_ARGS__); \
        } \
    }()

// Ends a call if header and host have different layouts.
#define GIN_REFUSE(...) \
    if (!matches_) return __VA_ARGS__

/// One context of a communicator. `deadline` limits each of its waits.
template <class Backend = Any>
class Gin {
public:
    GIN_FN Gin(const Comm& comm, uint32_t context, Deadline deadline, Sharing sharing = Sharing::Gpu,
               Route route = Route::Auto)
        : comm_(comm.handle()), deadline_(deadline.ns), context_(context),
          options_(static_cast<uint32_t>(route) | static_cast<uint32_t>(sharing) << 2), matches_(comm.matches()),
          known_(detail::hidden(matches_)) {}

    /// Writes `bytes` bytes of an own window to a window of the peer. All threads of the coop call, here and below.
    template <class D, class S, class RemoteAction = None, class LocalAction = None, class Coop = CoopThread>
    GIN_FN Fault put(const Team& team, uint32_t peer, const Window<D>& dstWindow, uint64_t dstOffset,
                     const Window<S>& srcWindow, uint64_t srcOffset, uint64_t bytes, RemoteAction remoteAction = {},
                     LocalAction localAction = {}, Coop coop = {}, Scope givenRelease = Scope::Thread,
                     Scope requiredRelease = Scope::Device, uint32_t optFlags = OptDefault) const {
        GIN_REFUSE(mismatch());
        detail::Raise raise = detail::raise(remoteAction);
        uint32_t world = detail::member(team, peer);
        if constexpr (inlines<RemoteAction>) {
            if (takesStores(world)) {
                const gin_device_window_t &to = dstWindow.handle(), &from = srcWindow.handle();
                detail::Target target = this->target(world, raise, localAction);
                auto windows = [&] { return detail::check_windows(comm_, known_, to, from); };
                auto names = [&] { return detail::check(comm_, target, coop.exists()); };
                auto ranges = [&] { return detail::check_put(to, world, dstOffset, from, srcOffset, bytes); };
                FaultKind kind = first_fault(windows, names, ranges);
                if (kind == FaultKind::None) {
                    uint64_t there = detail::part_of(to, world) + dstOffset;
                    detail::put_here(comm_, target, there, from.base + srcOffset, bytes, coop);
                    return Fault();
                }
                if (onlyStores()) return refused(kind, detail::OpPut, world);
            }
        }
        uint32_t options = options_ | raise.options | detail::counter_bit(localAction) | detail::given(givenRelease) |
                           detail::required(requiredRelease) | (optFlags & OptAggregateRequests);
        return Fault(GIN_FORM(gin_put, comm_.copy, context_, options, coop.word(), world,
                              detail::counter_id(localAction), dstWindow.handle().data, dstOffset,
                              srcWindow.handle().data, srcOffset, bytes, raise.window, raise.signal, raise.amount,
                              deadline_));
    }
    /// Does the same with elements.
    template <class T, class RemoteAction = None, class LocalAction = None, class Coop = CoopThread>
    GIN_FN Fault put(const Team& team, uint32_t peer, const SymPtr<T>& dst, const SymPtr<T>& src, std::size_t elements,
                     RemoteAction remoteAction = {}, LocalAction localAction = {}, Coop coop = {},
                     Scope givenRelease = Scope::Thread, Scope requiredRelease = Scope::Device,
                     uint32_t optFlags = OptDefault) const {
        return put(team, peer, dst.window, dst.offset(), src.window, src.offset(), elements * sizeof(T), remoteAction,
                   localAction, coop, givenRelease, requiredRelease, optFlags);
    }
    /// Writes a value of 1, 2, 4 or 8 bytes to a window of the peer.
    template <class D, class V, class RemoteAction = None, class Coop = CoopThread>
    GIN_FN Fault putValue(const Team& team, uint32_t peer, const Window<D>& dstWindow, uint64_t dstOffset, V value,
                          RemoteAction remoteAction = {}, Coop coop = {}, Scope givenRelease = Scope::Thread,
                          Scope requiredRelease = Scope::Device, uint32_t optFlags = OptDefault) const {
        GIN_REFUSE(mismatch());
        detail::Raise raise = detail::raise(remoteAction);
        uint32_t world = detail::member(team, peer);
        if constexpr (inlines<RemoteAction>) {
            if (takesStores(world)) {
                const gin_device_window_t& to = dstWindow.handle();
                detail::Target target = this->target(world, raise, None{});
                auto windows = [&] { return detail::check_windows(comm_, known_, to); };
                auto names = [&] { return detail::check(comm_, target, coop.exists()); };
                auto ranges = [&] { return detail::check_value(to, world, dstOffset, sizeof(V)); };
                FaultKind kind = first_fault(windows, names, ranges);
                if (kind == FaultKind::None) {
                    uint64_t there = detail::part_of(to, world) + dstOffset;
                    detail::raise_here<sizeof(V)>(comm_, target, there, detail::bits_of(value), Scope::Thread, coop);
                    return Fault();
                }
                if (onlyStores()) return refused(kind, detail::OpPutValue, world);
            }
        }
        uint32_t options = options_ | raise.options | detail::given(givenRelease) | detail::required(requiredRelease) |
                           (optFlags & OptAggregateRequests);
        return Fault(GIN_FORM(gin_put_value, comm_.copy, context_, options, coop.word(), world,
                              static_cast<uint32_t>(sizeof(V)), dstWindow.handle().data, dstOffset,
                              detail::bits_of(value), raise.window, raise.signal, raise.amount, deadline_));
    }
    /// Reads `bytes` bytes of a window of the peer into an own window. A flush or a barrier makes them visible.
    template <class R, class L, class Coop = CoopThread>
    GIN_FN Fault get(const Team& team, uint32_t peer, const Window<R>& remoteWindow, uint64_t remoteOffset,
                     const Window<L>& localWindow, uint64_t localOffset, uint64_t bytes, Coop coop = {}) const {
        GIN_REFUSE(mismatch());
        return Fault(GIN_FORM(gin_get, comm_.copy, context_, options_, coop.word(), detail::member(team, peer),
                              remoteWindow.handle().data, remoteOffset, localWindow.handle().data, localOffset, bytes,
                              deadline_));
    }
    /// Raises a signal of the peer.
    template <class RemoteAction, class Coop = CoopThread>
    GIN_FN Fault signal(const Team& team, uint32_t peer, RemoteAction remoteAction, Coop coop = {},
                        Scope givenRelease = Scope::Thread, Scope requiredRelease = Scope::Device,
                        uint32_t optFlags = OptDefault) const {
        return raise(0, team, peer, remoteAction, coop, givenRelease, requiredRelease, optFlags);
    }
    /// Does the same after all earlier puts to the peer, of either route.
    template <class RemoteAction, class Coop = CoopThread>
    GIN_FN Fault signalAllRoutes(const Team& team, uint32_t peer, RemoteAction remoteAction, Coop coop = {}) const {
        return raise(detail::AllRoutes, team, peer, remoteAction, coop, Scope::Thread, Scope::Device, OptDefault);
    }
    /// Does the same after all earlier puts to the peer, of any context and route. Waits for the puts of other contexts
    /// first.
    template <class RemoteAction, class Coop = CoopThread>
    GIN_FN Fault signalAllContexts(const Team& team, uint32_t peer, RemoteAction remoteAction, Coop coop = {}) const {
        GIN_REFUSE(mismatch());
        detail::Raise raise = detail::raise(remoteAction);
        return Fault(GIN_FORM(gin_signal_all_contexts, comm_.copy, context_, options_ | raise.options, coop.word(),
                              detail::member(team, peer), raise.window, raise.signal, raise.amount, deadline_));
    }

    /// Waits until all earlier operations are complete: sources may be reused, gets are visible.
    template <class Coop>
    GIN_FN Fault flush(Coop coop, Order order = Order::Acquire) const {
        GIN_REFUSE(mismatch());
        return Fault(GIN_FORM(gin_flush, comm_.copy, context_, with(order), coop.word(), deadline_));
    }
    /// Waits until all earlier puts to the peer have arrived. Acquires and releases, at system scope.
    template <class Coop>
    GIN_FN Fault quiet(Coop coop, const Team& team, uint32_t peer) const {
        GIN_REFUSE(mismatch());
        return Fault(GIN_FORM(gin_quiet, comm_.copy, context_, options_, coop.word(), detail::member(team, peer),
                              deadline_));
    }
    /// Does the same for all peers.
    template <class Coop>
    GIN_FN Fault quietAll(Coop coop) const {
        GIN_REFUSE(mismatch());
        return Fault(GIN_FORM(gin_quiet_all, comm_.copy, context_, options_, coop.word(), deadline_));
    }
    /// Notes the operations posted to the peer until now. Does not wait.
    GIN_FN Fault flushAsync(const Team& team, uint32_t peer, Request* request) const {
        GIN_REFUSE(mismatch());
        request->peer = detail::member(team, peer);
        gin_value_t position = GIN_FORM(gin_flush_async, comm_.copy, context_, options_, request->peer);
        request->position = position.value;
        return Fault(position.fault);
    }
    /// Waits until the noted operations are complete.
    template <class Coop = CoopThread>
    GIN_FN Fault wait(const Request& request, Coop coop = {}, Order order = Order::Acquire) const {
        GIN_REFUSE(mismatch());
        return Fault(GIN_FORM(gin_wait, comm_.copy, context_, with(order), coop.word(), request.peer, request.position,
                              deadline_));
    }

    /// Returns the value of a signal.
    GIN_FN Result<uint64_t> readSignal(uint32_t signal, uint32_t bits = 64, Order order = Order::Acquire) const {
        return read(0, signal, bits, order);
    }
    /// Returns the value of a signal at a word of a window.
    template <class T>
    GIN_FN Result<uint64_t> readSignal(const Window<T>& window, uint64_t offset, uint32_t bits = 64,
                                       Order order = Order::Acquire) const {
        return read(window.handle().data, offset, bits, order);
    }
    /// Waits until a signal is at or past `least`.
    template <class Coop>
    GIN_FN Fault waitSignal(Coop coop, uint32_t signal, uint64_t least, uint32_t bits = 64,
                            Order order = Order::Acquire) const {
        return await(coop, 0, signal, least, bits, order);
    }
    /// Waits until a signal at a word of a window is at or past `least`.
    template <class Coop, class T>
    GIN_FN Fault waitSignal(Coop coop, const Window<T>& window, uint64_t offset, uint64_t least, uint32_t bits = 64,
                            Order order = Order::Acquire) const {
        return await(coop, window.handle().data, offset, least, bits, order);
    }
    /// Waits until a signal is at or past its shadow.
    template <class Coop>
    GIN_FN Fault waitSignalMeetShadow(Coop coop, uint32_t signal, uint32_t bits = 64,
                                      Order order = Order::Acquire) const {
        GIN_REFUSE(mismatch());
        bool here = pollsHere(bits) && detail::check_signal(comm_, context_, signal, bits) == FaultKind::None;
        auto meets = [&] {
            uint64_t least = detail::load_relaxed_gpu(detail::shadow_at(comm_, context_, signal));
            return detail::signal_meets(comm_, context_, signal, least, bits, order);
        };
        return lead(coop, here, with(order), meets, [&](uint32_t options) {
            return GIN_FORM(gin_wait_signal_meet_shadow, comm_.copy, context_, options, coop.word(), signal, bits,
                            deadline_);
        });
    }
    /// Waits until a signal is `leastDelta` past its shadow, which then follows it. `before` and `delta` may be null.
    template <class Coop>
    GIN_FN Fault waitSignalFollowShadow(Coop coop, uint32_t signal, uint64_t leastDelta, uint64_t* before = nullptr,
                                        uint64_t* delta = nullptr, uint32_t bits = 64,
                                        Order order = Order::Acquire) const {
        GIN_REFUSE(mismatch());
        gin_followed_t followed = GIN_FORM(gin_wait_signal_follow_shadow, comm_.copy, context_, with(order),
                                           coop.word(), signal, bits, leastDelta, deadline_);
        if (before) *before = followed.before;
        if (delta) *delta = followed.delta;
        return Fault(followed.fault);
    }
    /// Returns the shadow of a signal.
    GIN_FN Result<uint64_t> signalShadow(uint32_t signal) const {
        GIN_REFUSE({0, mismatch()});
        FaultKind kind = detail::check_signal(comm_, context_, signal, 64);
        if (kind == FaultKind::None) {
            return {detail::load_relaxed_gpu(detail::shadow_at(comm_, context_, signal)), Fault()};
        }
        if (onlyStores()) return {0, refused(kind, detail::OpWaitSignal)};
        gin_value_t value = gin_signal_shadow(comm_.copy, context_, signal);
        return {value.value, Fault(value.fault)};
    }
    /// Adds to the shadow of a signal.
    GIN_FN Fault increaseSignalShadow(uint32_t signal, uint64_t delta) const {
        GIN_REFUSE(mismatch());
        FaultKind kind = detail::check_signal(comm_, context_, signal, 64);
        if (kind == FaultKind::None) {
            (void)detail::add_relaxed_cta(detail::shadow_at(comm_, context_, signal), delta);
            return Fault();
        }
        if (onlyStores()) return refused(kind, detail::OpWaitSignal);
        return Fault(gin_increase_signal_shadow(comm_.copy, context_, signal, delta));
    }
    /// Returns the value of a counter.
    GIN_FN Result<uint64_t> readCounter(uint32_t counter, uint32_t bits = 56, Order order = Order::Acquire) const {
        GIN_REFUSE({0, mismatch()});
        if (readsHere()) {
            FaultKind kind = detail::check_counter(comm_, context_, counter, bits);
            if (kind == FaultKind::None) {
                return {detail::counter_value(comm_, context_, counter, bits, order), Fault()};
            }
            if (onlyStores()) return {0, refused(kind, detail::OpWaitCounter)};
        }
        gin_value_t value = GIN_FORM(gin_read_counter, comm_.copy, context_, with(order), counter, bits);
        return {value.value, Fault(value.fault)};
    }
    /// Waits until a counter is at or past `least`.
    template <class Coop>
    GIN_FN Fault waitCounter(Coop coop, uint32_t counter, uint64_t least, uint32_t bits = 56,
                             Order order = Order::Acquire) const {
        GIN_REFUSE(mismatch());
        bool here = pollsHere(bits) && detail::check_counter(comm_, context_, counter, bits) == FaultKind::None;
        auto meets = [&] { return detail::counter_meets(comm_, context_, counter, least, bits, order); };
        return lead(coop, here, with(order), meets, [&](uint32_t options) {
            return GIN_FORM(gin_wait_counter, comm_.copy, context_, options, coop.word(), counter, least, bits,
                            deadline_);
        });
    }
    /// Sets a signal, and its shadow, to 0. No operation that raises it may be under way.
    GIN_FN Fault resetSignal(uint32_t signal) const {
        GIN_REFUSE(mismatch());
        return Fault(gin_reset_signal(comm_.copy, context_, 0, signal));
    }
    /// Sets a signal at a word of a window to 0.
    template <class T>
    GIN_FN Fault resetSignal(const Window<T>& window, uint64_t offset) const {
        GIN_REFUSE(mismatch());
        return Fault(gin_reset_signal(comm_.copy, context_, window.handle().data, offset));
    }
    /// Sets a counter to 0. No operation that raises it may be under way.
    GIN_FN Fault resetCounter(uint32_t counter) const {
        GIN_REFUSE(mismatch());
        return Fault(gin_reset_counter(comm_.copy, context_, counter));
    }
    /// Meets the ranks of a team in one of the barriers that the communicator has.
    template <class Coop>
    GIN_FN Fault barrier(Coop coop, BarrierTeam team, uint32_t index, Fence fence, bool allContexts = false) const {
        return meet(gin_barrier, coop, team, index, fence, allContexts);
    }
    /// Arrives at a barrier, and does not wait for the other ranks. The next use of the barrier is `barrierWait`, with
    /// the same arguments.
    template <class Coop>
    GIN_FN Fault barrierArrive(Coop coop, BarrierTeam team, uint32_t index, Fence fence,
                               bool allContexts = false) const {
        return meet(gin_barrier_arrive, coop, team, index, fence, allContexts);
    }
    /// Waits for the ranks of a barrier at which this rank has arrived.
    template <class Coop>
    GIN_FN Fault barrierWait(Coop coop, BarrierTeam team, uint32_t index, Fence fence,
                             bool allContexts = false) const {
        return meet(gin_barrier_wait, coop, team, index, fence, allContexts);
    }

private:
    // Posts that raise this inline, if loads and stores reach the peer.
    template <class RemoteAction>
    static constexpr bool inlines = std::is_same_v<Backend, Any> && !detail::at_window<RemoteAction>;
    GIN_FN bool onlyStores() const { return std::is_same_v<Backend, Any> && (options_ & 3) == uint32_t(Route::Lsa); }
    GIN_FN bool takesStores(uint32_t peer) const {
        return onlyStores() || ((options_ & 3) == uint32_t(Route::Auto) && detail::reaches(comm_, peer));
    }
    template <class LocalAction>
    GIN_FN detail::Target target(uint32_t peer, const detail::Raise& raise, LocalAction localAction) const {
        return {context_, peer, (raise.options & detail::Signal) != 0, raise.signal, raise.amount,
                detail::counter_bit(localAction) != 0, detail::counter_id(localAction)};
    }
    // The fault of the first check that does not hold. If a called function will find it again, any fault: without the
    // kinds, nvcc makes short branches of the checks.
    template <class... Checks>
    GIN_FN FaultKind first_fault(const Checks&... checks) const {
        if (!onlyStores()) {
            bool hold = ((checks() == FaultKind::None) && ...);
            return hold ? FaultKind::None : FaultKind::BadDescriptor;
        }
        FaultKind kind = FaultKind::None;
        (void)(((kind = checks()) == FaultKind::None) && ...);
        return kind;
    }
    // The fault of a call that a called function would refuse with its values too.
    GIN_FN Fault refused(FaultKind kind, uint32_t operation, uint32_t peer = GIN_NONE) const {
        return Fault(kind, operation, context_, peer);
    }
    GIN_FN static Fault mismatch() { return Fault(FaultKind::AbiMismatch); }
    // Reads inline, unless kernels drive a NIC: then a read does the NIC's work too.
    GIN_FN bool readsHere() const {
#if defined(__CUDACC__)
        return !std::is_same_v<Backend, Gdaki>;
#else
        return !std::is_same_v<Backend, Gdaki> && comm_.gdaki_contexts == 0;
#endif
    }
    GIN_FN bool pollsHere(uint32_t bits) const { return readsHere() && detail::polls(comm_, bits); }
    GIN_FN uint32_t with(Order order) const { return options_ | static_cast<uint32_t>(order) << 4; }
    // Waits with the threads of a coop. If `here`, one of them polls a short time by `meets`, and now and then looks
    // for a fault after that, as `look_around` of gin/completion.rs does. Otherwise, and after that time, they `call`.
    template <class Coop, class Meets, class Call>
    GIN_FN Fault lead(Coop coop, bool here, uint32_t options, Meets meets, Call call) const {
        if (here && coop.exists()) {
            bool late = false, ended = false;
            (void)coop.sync();
            if (coop.thread_rank() == 0) {
                late = !meets();
                ended = !late && std::is_same_v<Backend, Any> && comm_.lsa_reach != 0 && detail::is_time_to_look() &&
                        gin_comm_fault_word(comm_.copy) != 0;
            }
            if (!coop.any(late || ended)) return Fault();
            // The function finds the fault again, for all threads.
            if (coop.any(ended)) options |= detail::Look;
        }
        return Fault(call(options));
    }
    template <class Function, class Coop>
    GIN_FN Fault meet(Function function, Coop coop, BarrierTeam team, uint32_t index, Fence fence,
                      bool allContexts) const {
        GIN_REFUSE(mismatch());
        uint32_t options = options_ | (allContexts ? detail::AllContexts : 0u);
        return Fault(function(comm_.copy, context_, options, coop.word(), static_cast<uint32_t>(team), index,
                              static_cast<uint32_t>(fence), deadline_));
    }
    template <class RemoteAction, class Coop>
    GIN_FN Fault raise(uint32_t routes, const Team& team, uint32_t peer, RemoteAction remoteAction, Coop coop,
                       Scope givenRelease, Scope requiredRelease, uint32_t optFlags) const {
        GIN_REFUSE(mismatch());
        detail::Raise raise = detail::raise(remoteAction);
        uint32_t world = detail::member(team, peer);
        if constexpr (inlines<RemoteAction>) {
            if (routes == 0 && takesStores(world)) {
                detail::Target target = this->target(world, raise, None{});
                FaultKind kind = detail::check(comm_, target, coop.exists());
                if (kind == FaultKind::None) {
                    detail::raise_here<0>(comm_, target, 0, 0, givenRelease, coop);
                    return Fault();
                }
                if (onlyStores()) return refused(kind, detail::OpSignal, world);
            }
        }
        uint32_t options = options_ | routes | raise.options | detail::given(givenRelease) |
                           detail::required(requiredRelease) | (optFlags & OptAggregateRequests);
        return Fault(GIN_FORM(gin_signal, comm_.copy, context_, options, coop.word(), world, raise.window, raise.signal,
                              raise.amount, deadline_));
    }
    GIN_FN Result<uint64_t> read(uint64_t window, uint64_t signal, uint32_t bits, Order order) const {
        GIN_REFUSE({0, mismatch()});
        if (window == 0 && readsHere()) {
            FaultKind kind = detail::check_signal(comm_, context_, signal, bits);
            if (kind == FaultKind::None) {
                return {detail::signal_value(comm_, context_, signal, bits, order), Fault()};
            }
            if (onlyStores()) return {0, refused(kind, detail::OpWaitSignal)};
        }
        gin_value_t value = GIN_FORM(gin_read_signal, comm_.copy, context_, with(order), window, signal, bits);
        return {value.value, Fault(value.fault)};
    }
    template <class Coop>
    GIN_FN Fault await(Coop coop, uint64_t window, uint64_t signal, uint64_t least, uint32_t bits, Order order) const {
        GIN_REFUSE(mismatch());
        bool here = window == 0 && pollsHere(bits) &&
                    detail::check_signal(comm_, context_, signal, bits) == FaultKind::None;
        auto meets = [&] { return detail::signal_meets(comm_, context_, signal, least, bits, order); };
        return lead(coop, here, with(order), meets, [&](uint32_t options) {
            return GIN_FORM(gin_wait_signal, comm_.copy, context_, options, coop.word(), window, signal, least, bits,
                            deadline_);
        });
    }

    gin_device_comm_t comm_;
    uint64_t deadline_;
    uint32_t context_, options_;
    bool matches_, known_;
};

#undef GIN_FORM
#undef GIN_REFUSE

}  // namespace gin

#pragma pop_macro("near")
#pragma pop_macro("check")
#pragma pop_macro("None")
