// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The operations of gin_device.cuh that inline: reads of the own signals and counters, the first polls of waits for
// them, and put, putValue and signal by loads and stores. Programs include gin_device.cuh, which includes this.
//
// Each function makes the accesses of its model in Rust, in the same order: `copy` and `publish` of
// gin-device/src/lsa.rs, `Words` of signal_words.rs, the conditions of gin/post/check.rs. An access has the name that
// it has in sys. On the virtual GPU it is a call of `libgin`, so that the scheduler and the detector of data races see
// it.

#pragma once

#if defined(__CUDACC__)
// What a kernel has once and calls.
#define GIN_COLD static __device__ __noinline__
#define GIN_NO_UNROLL _Pragma("unroll 1")
#else
#define GIN_COLD inline
#define GIN_NO_UNROLL
#endif

namespace gin {
namespace detail {

// ---- Accesses ----------------------------------------------------------------------------------------------------

#if defined(__CUDACC__)
#define GIN_LOAD(name, ptx, type, letter, number) \
    GIN_FN type name(uint64_t address) { \
        type value; \
        asm volatile(ptx " %0, [%1];" : "=" letter(value) : "l"(address) : "memory"); \
        return value; \
    }
#define GIN_STORE(name, ptx, type, letter, number) \
    GIN_FN void name(uint64_t address, type value) { \
        asm volatile(ptx " [%0], %1;" : : "l"(address), letter(value) : "memory"); \
    }
#define GIN_CHANGE(name, ptx, number) \
    GIN_FN uint64_t name(uint64_t address, uint64_t value) { \
        uint64_t old; \
        asm volatile(ptx " %0, [%1], %2;" : "=l"(old) : "l"(address), "l"(value) : "memory"); \
        return old; \
    }
// As sys does: PTX 8.6 has these fences for sm_90. nvcc 12.8 writes it, and clang 22 for the bitcode of gin.
#if defined(__CUDACC_VER_MAJOR__)
#define GIN_PTX_86 (__CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 8))
#elif defined(__clang_major__)
#define GIN_PTX_86 (__clang_major__ >= 22)
#else
#define GIN_PTX_86 0
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && GIN_PTX_86
#define GIN_FENCE(name, ptx, fallback, number) \
    GIN_FN void name() { asm volatile(ptx ";" : : : "memory"); }
#else
#define GIN_FENCE(name, ptx, fallback, number) \
    GIN_FN void name() { asm volatile(fallback ";" : : : "memory"); }
#endif
#else
#define GIN_LOAD(name, ptx, type, letter, number) \
    GIN_FN type name(uint64_t address) { return static_cast<type>(gin_virtual_access(number, address, 0)); }
#define GIN_STORE(name, ptx, type, letter, number) \
    GIN_FN void name(uint64_t address, type value) { (void)gin_virtual_access(number, address, value); }
#define GIN_CHANGE(name, ptx, number) \
    GIN_FN uint64_t name(uint64_t address, uint64_t value) { return gin_virtual_access(number, address, value); }
#define GIN_FENCE(name, ptx, fallback, number) \
    GIN_FN void name() { (void)gin_virtual_access(number, 0, 0); }
#endif

GIN_LOAD(load_relaxed_sys, "ld.relaxed.sys.global.u64", uint64_t, "l", 0)
GIN_LOAD(load_relaxed_gpu, "ld.relaxed.gpu.global.u64", uint64_t, "l", 1)
GIN_STORE(red_add_relaxed_sys, "red.relaxed.sys.global.add.u64", uint64_t, "l", 2)
GIN_STORE(red_add_relaxed_gpu, "red.relaxed.gpu.global.add.u64", uint64_t, "l", 3)
GIN_CHANGE(add_relaxed_cta, "atom.relaxed.cta.global.add.u64", 4)
GIN_FENCE(fence_acquire_sys, "fence.acquire.sys", "fence.acq_rel.sys", 5)
GIN_FENCE(fence_release_sys, "fence.release.sys", "fence.acq_rel.sys", 6)
GIN_FENCE(fence_release_gpu, "fence.release.gpu", "fence.acq_rel.gpu", 7)
GIN_LOAD(load_relaxed_sys_u8, "ld.relaxed.sys.global.u8", uint32_t, "r", 8)
GIN_LOAD(load_relaxed_sys_u32, "ld.relaxed.sys.global.u32", uint32_t, "r", 9)
GIN_STORE(store_weak_u8, "st.global.u8", uint32_t, "r", 11)
GIN_STORE(store_weak_u16, "st.global.u16", uint32_t, "r", 12)
GIN_STORE(store_weak_u32, "st.global.u32", uint32_t, "r", 13)
GIN_STORE(store_weak_u64, "st.global.u64", uint64_t, "l", 14)

struct Pair {
    uint64_t low, high;
};

#if defined(__CUDACC__)
GIN_FN Pair load_weak_pair(uint64_t address) {
    Pair pair;
    asm volatile("ld.global.v2.u64 {%0, %1}, [%2];" : "=l"(pair.low), "=l"(pair.high) : "l"(address) : "memory");
    return pair;
}
GIN_FN void store_weak_pair(uint64_t address, Pair pair) {
    asm volatile("st.global.v2.u64 [%0], {%1, %2};" : : "l"(address), "l"(pair.low), "l"(pair.high) : "memory");
}
/// Reads a word of a table, which is constant while kernels may read it. Volatile: otherwise nvcc moves the load out of
/// loops, to before the conditions under which there is a table.
GIN_FN uint64_t read_word(uint64_t address) {
    uint64_t value;
    asm volatile("ld.global.u64 %0, [%1];" : "=l"(value) : "l"(address));
    return value;
}
/// Reads such a word if there is a table, else returns 0. Not volatile: nvcc may move the load out of loops, with its
/// condition. After a wait, which empties the L1, each load takes a trip to L2.
GIN_FN uint64_t read_word_if(bool exists, uint64_t address) {
    uint64_t value;
    asm("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.u64 %0, [%1]; @!p mov.u64 %0, 0; }"
        : "=l"(value) : "l"(address), "r"(uint32_t{exists}));
    return value;
}
/// Returns its argument, of which the compiler then knows nothing: it keeps the conditions of loads that it moves.
GIN_FN bool hidden(bool bit) {
    uint32_t same;
    asm("mov.u32 %0, %1;" : "=r"(same) : "r"(uint32_t{bit}));
    return same != 0;
}
/// As `of_lane` of sys: the assembler does not count the lanes that add the same.
GIN_FN uint64_t of_lane(uint64_t value) {
    uint32_t lanes;
    asm("mov.u32 %0, %%lanemask_eq; popc.b32 %0, %0;" : "=r"(lanes));
    return value * lanes;
}
GIN_FN uint64_t cycles() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(now));
    return now;
}
#else
GIN_FN Pair load_weak_pair(uint64_t address) {
    uint64_t low = gin_virtual_access(10, address, 0);
    return {low, gin_virtual_access(10, address + 8, 0)};
}
GIN_FN void store_weak_pair(uint64_t address, Pair pair) {
    store_weak_u64(address, pair.low);
    store_weak_u64(address + 8, pair.high);
}
GIN_FN uint64_t read_word(uint64_t address) { return *reinterpret_cast<const uint64_t*>(address); }
GIN_FN uint64_t read_word_if(bool exists, uint64_t address) { return exists ? read_word(address) : 0; }
GIN_FN bool hidden(bool bit) { return bit; }
GIN_FN uint64_t of_lane(uint64_t value) { return value; }
GIN_FN uint64_t cycles() { return gin_virtual_access(15, 0, 0); }
#endif

#undef GIN_LOAD
#undef GIN_STORE
#undef GIN_CHANGE
#undef GIN_FENCE
#undef GIN_PTX_86

// ---- Tables ------------------------------------------------------------------------------------------------------

/// `ContextData` of gin-abi.
struct alignas(16) Context {
    uint64_t producer_index, consumer_index, slots;
    uint16_t depth_log2, timed;
    uint32_t depth_mask;
    uint64_t oldest_incomplete, completion_index, counters, counter_near, signal_gpu, signal_nic, signal_cpu;
    uint64_t signal_near, signal_shadow, counters_gpu, busy, mailbox;
};

using Entry = gin_device_window_entry_t;

// Codes and layouts of gin-abi and gin-device.
enum : uint32_t { EngineGpu = 1, EngineNic = 2, EngineCpu = 4 };
enum : uint32_t { SignalBits = 64, CounterBits = 56, StrideShift = 32 };
enum : uint64_t { NearBytes = 64, NearBase = 16, NearLast = 32, NearMail = 40 };
enum : uint32_t { Wide = 48, Looks = 32, NowAndThen = 63 << 8 };
enum Operation : uint32_t { OpPut = 1, OpPutValue = 2, OpSignal = 4, OpWaitSignal = 6, OpWaitCounter = 7 };

#define GIN_WORD_OF(type, address, field) read_word((address) + offsetof(type, field))

GIN_FN uint64_t context_at(const gin_device_comm_t& comm, uint32_t context) {
    return comm.context_table + sizeof(Context) * static_cast<uint64_t>(context);
}

/// Returns whether a `Gin<Any>` serves the context.
GIN_FN bool usable(const gin_device_comm_t& comm, uint32_t context) {
#if defined(__CUDACC__)
    return context < comm.proxy_contexts;
#else
    return context < comm.proxy_contexts || context < comm.gdaki_contexts;
#endif
}

GIN_FN FaultKind check_context(const gin_device_comm_t& comm, uint32_t context) {
    if (usable(comm, context)) return FaultKind::None;
    return context < comm.contexts ? FaultKind::NoBackend : FaultKind::UnknownContext;
}

/// Returns whether operations reach a rank by loads and stores.
GIN_FN bool reaches(const gin_device_comm_t& comm, uint32_t rank) { return rank - comm.lsa_first < comm.lsa_reach; }

/// Returns whether a window names an entry of the communicator's table.
GIN_FN bool names(const gin_device_comm_t& comm, const gin_device_window_t& window) {
    uint64_t place = sizeof(Entry) * uint64_t{window.id};
    return (window.id < comm.windows) & (window.data - comm.window_table == place);
}

/// Returns whether a window of a usable communicator names an entry that is that window, and registered. It is while
/// the kernel runs, or is not.
GIN_FN bool registered(const gin_device_comm_t& comm, bool usable, const gin_device_window_t& window) {
    bool named = usable & names(comm, window);
    // The first word has `active` and `flags`.
    uint32_t active = static_cast<uint32_t>(read_word_if(named, window.data + offsetof(Entry, active)));
    uint64_t base = read_word_if(named, window.data + offsetof(Entry, base));
    uint64_t length = read_word_if(named, window.data + offsetof(Entry, length));
    return (active != 0) & (base == window.base) & (length == window.own_length);
}

/// Returns whether a range is in the caller's own part.
GIN_FN bool fits_own(const gin_device_window_t& window, uint64_t offset, uint64_t bytes) {
    return (offset + bytes >= offset) & (offset + bytes <= window.own_length);
}

/// Returns whether a range is in a rank's part.
GIN_FN bool fits_on(const gin_device_window_t& window, uint32_t rank, uint64_t offset, uint64_t bytes) {
    uint64_t end = offset + bytes;
    return end >= offset && (end <= window.least_length ||
                             end <= read_word(GIN_WORD_OF(Entry, window.data, lengths) + 8 * uint64_t{rank}));
}

/// Returns the address of a rank's part. Loads and stores reach the rank.
GIN_FN uint64_t part_of(const gin_device_window_t& window, uint32_t rank) {
    if (window.stride != 0) {
        return window.base + (static_cast<uint64_t>((rank - window.rank) * window.stride) << StrideShift);
    }
    uint64_t peers = GIN_WORD_OF(Entry, window.data, peers);
    return peers == 0 ? 0 : read_word(peers + 8 * uint64_t{rank});
}

// ---- Posts by loads and stores -----------------------------------------------------------------------------------

/// The target of a post, and the words that it raises. Signals at addresses of windows are not among them.
struct Target {
    uint32_t context, peer;
    bool raises;
    uint64_t signal, amount;
    bool counts;
    uint32_t counter;
};

/// Returns the fault of the first condition of a post that does not hold. `coop` says that there are such threads.
GIN_FN FaultKind check(const gin_device_comm_t& comm, const Target& target, bool coop) {
    if (target.peer >= comm.ranks) return FaultKind::UnknownRank;
    if (!coop) return FaultKind::BadDescriptor;
    FaultKind context = check_context(comm, target.context);
    if (context != FaultKind::None) return context;
    if (!reaches(comm, target.peer)) return FaultKind::NotReachable;
    if (target.raises && target.signal >= comm.signals) return FaultKind::UnknownSignal;
    if (target.counts && target.counter >= comm.counters) return FaultKind::UnknownCounter;
    return FaultKind::None;
}

/// Returns the fault of windows that are not of the communicator, or closed. All loads are under way together.
template <class... Windows>
GIN_FN FaultKind check_windows(const gin_device_comm_t& comm, bool usable, const Windows&... windows) {
    uint32_t all = (static_cast<uint32_t>(registered(comm, usable, windows)) & ...);
    return all != 0 ? FaultKind::None : FaultKind::UnknownWindow;
}

/// Returns the fault of the ranges of a put.
GIN_FN FaultKind check_put(const gin_device_window_t& to, uint32_t peer, uint64_t to_offset,
                           const gin_device_window_t& from, uint64_t from_offset, uint64_t bytes) {
    bool fits = fits_on(to, peer, to_offset, bytes) && fits_own(from, from_offset, bytes);
    return fits ? FaultKind::None : FaultKind::OutOfRange;
}

/// Returns the fault of the destination of a value.
GIN_FN FaultKind check_value(const gin_device_window_t& to, uint32_t peer, uint64_t offset, uint64_t bytes) {
    if ((offset | to.base) & (bytes - 1)) return FaultKind::Misaligned;
    return fits_on(to, peer, offset, bytes) ? FaultKind::None : FaultKind::OutOfRange;
}

/// The addresses of the words that a post raises. The post was checked.
struct Raises {
    uint64_t signal, counter;
};

GIN_FN Raises raises_of(const gin_device_comm_t& comm, const Target& target) {
    Raises raises{0, 0};
    if (target.raises) {
        uint32_t place = target.context * comm.ranks + target.peer;
        raises.signal = read_word(comm.peer_signals + 8 * uint64_t{place}) + 8 * target.signal;
    }
    if (target.counts) {
        uint64_t context = context_at(comm, target.context);
        raises.counter = GIN_WORD_OF(Context, context, counters_gpu) + 8 * uint64_t{target.counter};
    }
    return raises;
}

/// Raises words of GPUs after earlier stores, in one thread of those that have met after their stores.
GIN_FN void publish(const Target& target, const Raises& raises, Scope given) {
    if (target.raises) {
        if (given < Scope::System) fence_release_sys();
    } else if (target.counts) {
        if (given < Scope::Device) fence_release_gpu();
    }
    if (target.raises) red_add_relaxed_sys(raises.signal, of_lane(target.amount));
    if (target.counts) red_add_relaxed_gpu(raises.counter, of_lane(1));
}

/// Copies the bytes that are no part of whole, aligned units of 16 bytes. Returns the number of bytes before such
/// units, or all bytes if the addresses allow none.
template <int = 0>
GIN_COLD uint64_t copy_unaligned(uint64_t to, uint64_t from, uint64_t bytes, uint64_t rank, uint64_t step) {
    uint64_t apart = to ^ from;
    uint32_t log2 = (apart & 15) == 0 ? 4 : (apart & 3) == 0 ? 2 : 0;
    uint64_t head = (0 - to) & ((1u << log2) - 1);
    if (head > bytes) head = bytes;
    uint64_t units = log2 == 0 ? 0 : (bytes - head) >> log2, body = units << log2;
    for (uint64_t index = rank; index < bytes - body; index += step) {
        uint64_t offset = index < head ? index : index + body;
        store_weak_u8(to + offset, load_relaxed_sys_u8(from + offset));
    }
    if (log2 == 4) return head;
    for (uint64_t unit = rank; unit < units; unit += step) {
        store_weak_u32(to + head + 4 * unit, load_relaxed_sys_u32(from + head + 4 * unit));
    }
    return bytes;
}

/// Copies whole units of 16 bytes of own memory to a peer with all threads of the coop. They do not meet.
template <class Coop>
GIN_FN void copy(Coop coop, uint64_t to, uint64_t from, uint64_t units) {
    uint64_t rank = coop.thread_rank(), step = coop.size();
    if (!std::is_same_v<Coop, CoopThread> && units <= step) {
        // Most small puts. No loop, so that the lanes of a warp need not part.
        if (rank < units) store_weak_pair(to + 16 * rank, load_weak_pair(from + 16 * rank));
        return;
    }
    uint64_t stride = 16 * step, unit = rank;
    GIN_NO_UNROLL
    for (; unit + 3 * step < units; unit += 4 * step) {
        uint64_t source = from + 16 * unit, destination = to + 16 * unit;
        Pair first = load_weak_pair(source), second = load_weak_pair(source + stride);
        Pair third = load_weak_pair(source + 2 * stride), fourth = load_weak_pair(source + 3 * stride);
        store_weak_pair(destination, first);
        store_weak_pair(destination + stride, second);
        store_weak_pair(destination + 2 * stride, third);
        store_weak_pair(destination + 3 * stride, fourth);
    }
    GIN_NO_UNROLL
    for (; unit < units; unit += step) store_weak_pair(to + 16 * unit, load_weak_pair(from + 16 * unit));
}

/// Carries out a put. All threads of the coop call; the post was checked.
template <class Coop>
GIN_FN void put_here(const gin_device_comm_t& comm, const Target& target, uint64_t to, uint64_t from, uint64_t bytes,
                     Coop coop) {
    (void)coop.sync();
    if ((to | from | bytes) & 15) {
        uint64_t head = copy_unaligned(to, from, bytes, coop.thread_rank(), coop.size());
        to += head, from += head, bytes -= head;
    }
    // Under way together with the first loads of the copy. Before `to` is known, they would wait for this.
    Raises raises = raises_of(comm, target);
    copy(coop, to, from, bytes / 16);
    // All threads have stored before one of them raises, and before any of them reads.
    (void)coop.sync();
    if (coop.thread_rank() == 0) publish(target, raises, Scope::Thread);
}

/// Carries out a put of a value of `Bytes` bytes, or a signal if that is 0. All threads of the coop call; the post was
/// checked.
template <unsigned Bytes, class Coop>
GIN_FN void raise_here(const gin_device_comm_t& comm, const Target& target, uint64_t to, uint64_t value, Scope given,
                       Coop coop) {
    (void)coop.sync();
    if (coop.thread_rank() == 0) {
        Raises raises = raises_of(comm, target);
        if constexpr (Bytes == 1) store_weak_u8(to, static_cast<uint32_t>(value));
        if constexpr (Bytes == 2) store_weak_u16(to, static_cast<uint32_t>(value));
        if constexpr (Bytes == 4) store_weak_u32(to, static_cast<uint32_t>(value));
        if constexpr (Bytes == 8) store_weak_u64(to, value);
        publish(target, raises, given);
    }
    (void)coop.sync();
}

// ---- Reads of own words ------------------------------------------------------------------------------------------

GIN_FN uint64_t mask(uint32_t bits) { return UINT64_MAX >> (64 - bits); }

GIN_FN uint64_t word_if(bool exists, uint64_t address) { return exists ? load_relaxed_sys(address) : 0; }

GIN_FN FaultKind check_signal(const gin_device_comm_t& comm, uint32_t context, uint64_t signal, uint32_t bits) {
    FaultKind kind = check_context(comm, context);
    if (kind != FaultKind::None) return kind;
    if (bits - 1 >= SignalBits) return FaultKind::BadWidth;
    return signal < comm.signals ? FaultKind::None : FaultKind::UnknownSignal;
}

/// Returns the value of a signal that was checked.
GIN_FN uint64_t signal_value(const gin_device_comm_t& comm, uint32_t context, uint64_t signal, uint32_t bits,
                             Order order) {
    uint64_t data = context_at(comm, context);
    uint64_t near = GIN_WORD_OF(Context, data, signal_near) + NearBytes * signal;
    uint64_t value = word_if(comm.engines & EngineGpu, GIN_WORD_OF(Context, data, signal_gpu) + 8 * signal);
    value += word_if(comm.engines & EngineNic, GIN_WORD_OF(Context, data, signal_nic) + 8 * signal);
    if (GIN_WORD_OF(Context, data, mailbox) != 0) value += load_relaxed_gpu(near + NearMail);
    value += word_if(comm.engines & EngineCpu, GIN_WORD_OF(Context, data, signal_cpu) + 8 * signal);
    value -= load_relaxed_gpu(near + NearBase);
    if (order == Order::Acquire) fence_acquire_sys();
    return value & mask(bits);
}

GIN_FN FaultKind check_counter(const gin_device_comm_t& comm, uint32_t context, uint32_t counter, uint32_t bits) {
    FaultKind kind = check_context(comm, context);
    if (kind != FaultKind::None) return kind;
    if (counter >= comm.counters) return FaultKind::UnknownCounter;
    return bits - 1 < CounterBits ? FaultKind::None : FaultKind::BadWidth;
}

/// Returns the value of a counter that was checked. No kernels of the communicator drive a NIC.
GIN_FN uint64_t counter_value(const gin_device_comm_t& comm, uint32_t context, uint32_t counter, uint32_t bits,
                              Order order) {
    uint64_t data = context_at(comm, context), offset = 8 * uint64_t{counter};
    uint64_t near = GIN_WORD_OF(Context, data, counter_near) + NearBytes * uint64_t{counter};
    uint64_t value =
        word_if(comm.engines & (EngineGpu | EngineNic), GIN_WORD_OF(Context, data, counters_gpu) + offset);
    value += word_if(comm.engines & EngineCpu, GIN_WORD_OF(Context, data, counters) + offset);
    value -= load_relaxed_gpu(near + NearBase);
    if (order == Order::Acquire) fence_acquire_sys();
    return value & mask(bits);
}

/// Returns the address of the shadow of a signal that was checked.
GIN_FN uint64_t shadow_at(const gin_device_comm_t& comm, uint32_t context, uint32_t signal) {
    return GIN_WORD_OF(Context, context_at(comm, context), signal_shadow) + 8 * uint64_t{signal};
}

// ---- The first polls of waits ------------------------------------------------------------------------------------

/// Returns whether a wait begins with polls of words in GPU memory. Otherwise it begins with the word in host memory,
/// for which all threads take turns, and with the mailbox: code that Rust calls too.
GIN_FN bool polls(const gin_device_comm_t& comm, uint32_t bits) {
    return (comm.engines & (EngineGpu | EngineNic)) != 0 && ((comm.engines & EngineCpu) == 0 || bits >= Wide);
}

/// Polls a signal or counter a short time, as `meets_soon` of signal_words.rs does. Returns whether it came to be at or
/// past `least`. An address is 0 if there is no such word; `near` is that of the near words. What CPU threads and the
/// mailbox have raised counts as at the beginning: if they raise now, the function finds it.
GIN_FN bool meets(const gin_device_comm_t& comm, uint64_t gpu, uint64_t nic, uint64_t near, uint64_t least,
                  uint32_t bits, Order order) {
    uint64_t base = load_relaxed_gpu(near + NearBase), last = 0, mail = 0;
    // Without a mailbox, its word stays 0.
    if (comm.engines & EngineCpu) last = load_relaxed_gpu(near + NearLast), mail = load_relaxed_gpu(near + NearMail);
    uint32_t looks = (last | mail) == 0 ? uint32_t{Looks} : 1;
    least += base - last - mail;
    GIN_NO_UNROLL
    for (; looks != 0; looks--) {
        uint64_t own = gpu != 0 ? load_relaxed_sys(gpu) : 0;
        if (nic != 0) own += load_relaxed_sys(nic);
        if (((own - least) & mask(bits)) <= mask(bits) >> 1) {
            if (order == Order::Acquire) fence_acquire_sys();
            return true;
        }
    }
    return false;
}

/// Polls a signal that was checked.
GIN_FN bool signal_meets(const gin_device_comm_t& comm, uint32_t context, uint64_t signal, uint64_t least,
                         uint32_t bits, Order order) {
    uint64_t data = context_at(comm, context);
    uint64_t gpu = comm.engines & EngineGpu ? GIN_WORD_OF(Context, data, signal_gpu) + 8 * signal : 0;
    uint64_t nic = comm.engines & EngineNic ? GIN_WORD_OF(Context, data, signal_nic) + 8 * signal : 0;
    uint64_t near = GIN_WORD_OF(Context, data, signal_near) + NearBytes * signal;
    return meets(comm, gpu, nic, near, least, bits, order);
}

/// Polls a counter that was checked. No kernels of the communicator drive a NIC.
GIN_FN bool counter_meets(const gin_device_comm_t& comm, uint32_t context, uint32_t counter, uint64_t least,
                          uint32_t bits, Order order) {
    uint64_t data = context_at(comm, context), offset = 8 * uint64_t{counter};
    uint64_t gpu = comm.engines & (EngineGpu | EngineNic) ? GIN_WORD_OF(Context, data, counters_gpu) + offset : 0;
    uint64_t near = GIN_WORD_OF(Context, data, counter_near) + NearBytes * uint64_t{counter};
    return meets(comm, gpu, 0, near, least, bits, order);
}

/// Returns whether a wait that has succeeded should look for a fault of the host now: rarely.
GIN_FN bool is_time_to_look() { return (cycles() & NowAndThen) == 0; }

#undef GIN_WORD_OF
#undef GIN_NO_UNROLL

}  // namespace detail
}  // namespace gin
