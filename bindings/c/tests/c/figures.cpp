// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Prints the text of a communicator's error after one mistake of a kernel, which the first argument names.

#include "gin.hpp"
#include "gin_device.cuh"

#include <cstdio>
#include <cstring>
#include <thread>

template <class Call>
std::string error_of(Call call) {
    try {
        call();
    } catch (const gin::Error& error) {
        return error.what();
    }
    return "no error";
}

enum Mistake : uint32_t { Signal, Counter, Range, Member, Id, Barrier, Outside, StoresRange, StoresId };

void kernel(gin::Comm comm, gin::Window<float> w, Mistake mistake) {
    gin::CoopCta cta;
    gin::Gin<> net(comm, 0, gin::Deadline::after_ms(20));
    gin::Gin<> stores(comm, 0, gin::Deadline::after_ms(20), gin::Sharing::Gpu, gin::Route::Lsa);
    gin::Team world = comm.world();
    gin::Fault fault;
    switch (mistake) {
    case Signal: fault = net.waitSignal(cta, 3, 1); break;
    case Counter: fault = net.waitCounter(cta, 2, 1); break;
    case Range: fault = net.put(world, 0, w, 16, w, 0, 32, gin::None{}, gin::None{}, cta); break;
    case Member: fault = net.put(world, 7, w, 0, w, 0, 4, gin::None{}, gin::None{}, cta); break;
    case Id: fault = net.signal(world, 0, gin::StrongSignalInc{99}, cta); break;
    case Barrier: fault = net.barrier(cta, gin::BarrierTeam::World, 5, gin::Fence::None); break;
    case Outside: fault = net.get(comm.lsa(), 9, w, 0, w, 0, 4, cta); break;
    case StoresRange: fault = stores.put(world, 0, w, 16, w, 0, 32, gin::None{}, gin::None{}, cta); break;
    case StoresId: fault = stores.signal(world, 0, gin::StrongSignalInc{99}, cta); break;
    }
    comm.report(fault);
}

void rank(const gin::Job& job, const char* name) {
    gin_requirements_t requirements = gin::default_requirements();
    requirements.world_barriers = 1;
    gin::Communicator comm(job, requirements);
    gin::HostWindow<float> window(comm, 10);
    if (job.rank() != 0) return;
    gin::Stream stream(job);
    auto made = gin::Kernel::of<kernel>("kernel");
    const char* names[] = {"signal",  "counter", "range",        "member",   "id",
                           "barrier", "outside", "stores range", "stores id"};
    for (uint32_t mistake = 0; mistake <= StoresId; mistake++) {
        if (std::strcmp(name, names[mistake]) != 0) continue;
        stream.launch(made, gin::cooperative(1, 32), comm.device(), window.device(), static_cast<Mistake>(mistake));
        stream.synchronize();
        std::puts(error_of([&] { comm.check_fault(); }).c_str());
    }
    if (std::strcmp(name, "arguments") != 0) return;
    // Without types, the library checks the number and the sizes.
    const gin::Kernel& untyped = made;
    gin_shape_t shape = gin::cooperative(1, 32);
    gin_device_window_t foreign{};
    std::puts(error_of([&] { stream.launch(untyped, shape, comm.device()); }).c_str());
    std::puts(error_of([&] { stream.launch(untyped, shape, comm.device(), window.device(), uint64_t{1}); }).c_str());
    std::puts(error_of([&] { stream.launch(made, shape, comm.device(), foreign, Signal); }).c_str());
}

int main(int, char** arguments) {
    gin_config_t config = gin::default_config();
    config.device = GIN_DEVICE_VIRTUAL;
    std::vector<gin::Job> jobs = gin::Job::local(2, config);
    std::thread other(rank, std::cref(jobs[1]), arguments[1]);
    rank(jobs[0], arguments[1]);
    other.join();
}
