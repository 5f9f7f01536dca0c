// SPDX-License-Identifier: MIT OR Apache-2.0
//
//   loss [FOLDER | survives]
//
// Three processes, of which rank 1 kills itself while kernels of the others wait for it. They get its loss as an error
// with a text, make a job without it, and put there. They meet as a launcher says; or, over an all-gather of this
// program, through files in the folder. With `survives` the communicator goes on, and rank 2 puts to rank 0 in it.

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

// Rank 2 puts to rank 0.
static void pass(gin::Comm comm, Words data) {
    gin::CoopThread one;
    gin::Gin<> net(comm, 0, gin::Deadline::after_ms(20000));
    gin::Team world = comm.world();
    gin::Fault fault;
    if (world.rank == 2) fault = net.putValue(world, 0, data, 0, uint64_t(7), gin::StrongSignalInc{0}, one);
    if (world.rank == 0) fault = net.waitSignal(one, 0, 1);
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
    bool survives = count > 1 && std::string(words[1]) == "survives";
    config.survive_losses = survives;
    gin::Job job;
    if (count > 1 && !survives) {
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
        gin::Stream stream(job);
        if (survives) {
            while (job.lost().empty()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
            expect(job.lost() == std::vector<uint32_t>{1}, "another rank is lost");
            gin::Kernel kernel = gin::Kernel::of<pass>("pass");
            stream.launch(kernel, gin::cooperative(1, 1), comm.device(), data.device());
            stream.synchronize();
            comm.check_fault();
            if (job.rank() == 0) expect(data.read()[0] == 7, "the value of rank 2");
            // A rank that ends the communicator aborts it on the others.
            job.without(job.lost(), 60000).barrier();
            std::printf("passed: the communicator goes on\n");
            return 0;
        }
        gin::Kernel kernel = gin::Kernel::of<meet>("meet");
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
