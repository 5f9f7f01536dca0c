// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Uses of each operation by each back end, with windows and signals. Tests compile this twice, as two units of one
// program, with all warnings of two compilers. It follows headers with macros of short names, as those of X11.

#define None 0L
#define Success 0
#define Status int
#define Always 2
#define check(x) (x)
#define near
#define far

#include "gin.hpp"
#include "gin_device.cuh"
#include "gin_ep.cuh"
#include "gin_ep.hpp"

#if None != 0L || check(2) != 2 || !defined(near)
#error "the headers change macros of the program"
#endif
#undef None
#undef check
#undef near

#ifndef UNIT
#define UNIT first
#endif

namespace UNIT {

template <class Backend>
gin::Fault all_of(gin::Comm comm, gin::Window<float> w, gin::Window<uint64_t> words, uint64_t n) {
    gin::CoopCta cta;
    gin::CoopWarp warp;
    gin::Team world = comm.world();
    gin::Gin<Backend> net(comm, 0, gin::Deadline::after_ms(100));
    uint32_t peer = world.after(1);
    gin::Fault f = net.put(world, peer, w, 0, w, 0, n, gin::StrongSignalInc{0}, gin::CounterInc{0}, cta);
    if (!f) f = net.put(world, peer, w, 0, w, 0, n, gin::WeakSignalAdd{1, 2}, gin::None{}, warp);
    if (!f) f = net.put(world, peer, w, 0, w, 0, n, gin::StrongVASignalInc<uint64_t>{words, 8});
    if (!f) f = net.put(world, peer, w, 0, w, 0, n, gin::WeakVASignalAdd<uint64_t>{words, 8, 3});
    if (!f) f = net.putValue(world, peer, words, 8, uint64_t{7}, gin::StrongSignalInc{0}, cta);
    if (!f) f = net.putValue(world, peer, w, 4, 1.5f, gin::None{}, gin::CoopTile<4>{});
    if (!f) f = net.get(world, peer, w, 0, w, 0, n, cta);
    if (!f) f = net.signal(world, peer, gin::StrongSignalAdd{0, 3}, cta);
    if (!f) f = net.signal(world, peer, gin::StrongVASignalAdd<uint64_t>{words, 0, 3}, gin::CoopLanes(1));
    if (!f) f = net.flush(gin::CoopWarpSpan{0, 1, 1});
    if (!f) f = net.quiet(cta, world, peer);
    if (!f) f = net.quietAll(gin::CoopThread{});
    if (!f) f = net.signalAllContexts(world, peer, gin::StrongVASignalAdd<uint64_t>{words, 0, 3}, cta);
    if (!f) f = net.waitSignal(cta, 0, 1);
    if (!f) f = net.waitSignal(cta, words, 8, 1);
    if (!f) f = net.waitCounter(cta, 0, 1);
    if (!f) f = net.readSignal(0).fault;
    if (!f) f = net.readSignal(words, 8).fault;
    if (!f) f = net.readCounter(0).fault;
    if (!f) f = net.barrier(cta, gin::BarrierTeam::World, 0, gin::Fence::None);
    if (!f) f = net.resetSignal(0);
    if (!f) f = net.resetCounter(0);
    gin::SymPtr<float> here{w, 1};
    return f ? f : gin::Fault(static_cast<uint64_t>(w.peerPointer(world, peer) == nullptr && here.offset() == 0));
}

void kernel(gin::Comm comm, gin::Window<float> w, gin::Window<uint64_t> words, uint64_t n) {
    comm.report(all_of<gin::Any>(comm, w, words, n));
    comm.report(all_of<gin::Proxy>(comm, w, words, n));
    comm.report(all_of<gin::Gdaki>(comm, w, words, n));
}

gin::Kernel made() { return gin::Kernel::of<kernel>("kernel"); }

void launch(const gin::Stream& stream, const gin::Communicator& comm, const gin::HostWindow<float>& window,
            const gin::HostWindow<uint64_t>& words) {
    auto typed = gin::Kernel::of<kernel>("kernel");
    const gin::Kernel& untyped = typed;
    stream.launch(typed, gin::cooperative(1, 32), comm.device(), window.device(), words.device(), 7u);
    stream.launch(untyped, gin::cooperative(1, 32), comm.device(), window.device(), words.device(), uint64_t{7});
}

void experts(gin::ep::ReceivedRows received, gin::ep::SourceInfo info) {
    if (info.is_gap()) return;
    float* row = received.row<float>(info.source(), info.row());
    row[0] *= received.weight(info.source(), info.row(), info.k()) * *received.scales<float>(0, 0);
    row[1] = float(received.token(0, 0) + received.count(0)) + float(received.expert(0, 0, 0));
}

void layer(const gin::Stream& stream, const gin::Communicator& comm, float* rows, const int32_t* ids) {
    gin::ep::Group group(comm, gin::ep::config(4, 8, 2));
    gin::ep::Slot slot(group, 0);
    gin::ep::Permuted layout(group, GIN_EP_EXPERT_MAJOR_PACKED, 16, 8);
    gin_ep_tokens_t tokens = gin::ep::tokens();
    tokens.rows = gin::ep::memory(rows, 8), tokens.ids = gin::ep::memory(ids, 2);
    gin::Graph graph = stream.capture([&] { slot.exchange_into(stream, tokens, layout); });
    stream.launch(graph);
    auto kernel = gin::Kernel::of<experts>("experts");
    stream.launch(kernel, gin::cooperative(1, 32), slot.received(), gin::ep::SourceInfo{0});
    slot.reduce(stream, layout);
    slot.combine(stream, gin::ep::combine(gin::ep::memory(rows, 8)));
    if (group.status() || slot.counts().empty() || layout.counts().empty()) group.readmit();
    slot.close();
    group.destroy();
}

}  // namespace UNIT

#ifdef MAIN
namespace second {
gin::Kernel made();
}

int main() { return UNIT::made().raw().id == second::made().raw().id; }
#endif
