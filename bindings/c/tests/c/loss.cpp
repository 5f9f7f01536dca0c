// SPDX-License-Identifier: MIT OR Apache-2.0
//
//   loss [FOLDER]
//
// Three processes, of which rank 1 kills itself while kernels of the others wait for it. They get its loss as an error
// with a text, make a job without it, and put there. They meet as a launcher says; or, over an all-gather of this
// program, through files in the folder.

#include "gin.hpp"
#include "gin_device.cuh"

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>

using Words = gin::Window<uint64_t>;

// Raises a signal of the next rank, and waits for `raises` raises of the own one.
static void meet(gin::Comm comm, Words data, uint64_t raises) {
    gin::CoopThread one;
    gin::Gin<> net(comm, 0, gin::Deadline::none());
    gin::Team world = comm.world();
    uint64_t value = 100 + world.rank;
    gin::Fault fault = net.putValue(world, world.after(1), data, 0, value, gin::StrongSignalInc{0}, one);
    if (!fault) fault = net.waitSignal(one, 0, raises);
    comm.report(fault);
}

static void expect(bool holds, const char* what) {
    if (!holds) throw std::runtime_error(what);
}

static bool says(const std::string& text, const char* words) { return text.find(words) != std::string::npos; }

// The parts of all ranks, as files.
struct Files {
    std::string folder;
    uint32_t rank, ranks;
};

static int32_t all_gather(void* user, const void* own, std::size_t bytes, void* all) {
    const Files& files = *static_cast<const Files*>(user);
    std::string name = files.folder + "/" + std::to_string(files.rank);
    std::ofstream(name + ".new", std::ios::binary).write(static_cast<const char*>(own), std::streamsize(bytes));
    if (std::rename((name + ".new").c_str(), name.c_str()) != 0) return 1;
    char* to = static_cast<char*>(all);
    for (uint32_t rank = 0; rank < files.ranks; rank++, to += bytes) {
        std::ifstream part;
        for (int tries = 0; !part.is_open() && tries < 30000; tries++) {
            part.open(files.folder + "/" + std::to_string(rank), std::ios::binary);
            if (!part.is_open()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        if (!part.read(to, std::streamsize(bytes))) return 2;
    }
    return 0;
}

static uint32_t number(const char* variable) { return uint32_t(std::atoi(std::getenv(variable))); }

int main(int count, char** words) try {
    gin_config_t config = gin::default_config();
    config.device = GIN_DEVICE_VIRTUAL;
    gin::Job job;
    if (count > 1) {
        config.address = "127.0.0.1";
        Files files{words[1], number("GIN_RANK"), number("GIN_RANKS")};
        job = gin::Job::over(files.rank, files.ranks, all_gather, &files, config);
    } else {
        job = gin::Job::from_env(config);
    }
    gin::Job remaining;
    {
        gin::Communicator comm(job);
        gin::HostWindow<uint64_t> data(comm, 4);
        job.barrier();
        if (job.rank() == 1) raise(SIGKILL);
        gin::Kernel kernel = gin::Kernel::of<meet>("meet");
        gin::Stream stream(job);
        // More raises than come: only the loss ends the wait.
        stream.launch(kernel, gin::cooperative(1, 1), comm.device(), data.device(), uint64_t(9));
        stream.synchronize();
        try {
            comm.check_fault();
            expect(false, "the loss is no error");
        } catch (const gin::Error& error) {
            expect(says(error.what(), "rank 1") && says(error.what(), "lost"), error.what());
        }
        uint32_t found;
        gin_fault_t fault;
        gin::check(gin_comm_fault(comm.raw(), &found, &fault));
        expect(found == 1 && fault.kind == 3 && fault.peer == 1 && says(fault.text, "rank 1"), fault.text);
        expect(job.lost() == std::vector<uint32_t>{1}, "another rank is lost");
        try {
            job.barrier();
            expect(false, "a barrier of a job with a lost rank passes");
        } catch (const gin::Error& error) {
            expect(says(error.what(), "rank 1"), error.what());
        }
        try {
            (void)job.without({7}, 1000);
            expect(false, "a job without an unknown rank is made");
        } catch (const gin::Error& error) {
            expect(says(error.what(), "7"), error.what());
        }
        remaining = job.without(job.lost(), 60000);
    }
    expect(remaining.ranks() == 2 && remaining.rank() == (job.rank() == 0 ? 0u : 1u), "the ranks that remain");
    gin::Communicator comm(remaining);
    gin::HostWindow<uint64_t> data(comm, 4);
    remaining.barrier();
    gin::Kernel kernel = gin::Kernel::of<meet>("meet");
    gin::Stream stream(remaining);
    stream.launch(kernel, gin::cooperative(1, 1), comm.device(), data.device(), uint64_t(1));
    stream.synchronize();
    comm.check_fault();
    expect(data.read()[0] == 101 - remaining.rank(), "the peer's value");
    remaining.barrier();
    data.close();
    comm.destroy();
    std::printf("passed: %u ranks remain\n", remaining.ranks());
    return 0;
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
