// SPDX-License-Identifier: MIT OR Apache-2.0
//
//   throws [other]
//
// A kernel in C++ that throws on the virtual GPU ends with an error that has the text of its exception. The next kernel
// runs. An exception that is no std::exception ends the process.

#include "gin.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

struct Guard {
    int* dropped;
    ~Guard() { (*dropped)++; }
};

static int dropped = 0;

static void throws(int wrong) {
    Guard guard{&dropped};
    if (wrong != 0) throw std::runtime_error("number " + std::to_string(wrong) + " is wrong");
}

static void throws_a_number(int number) { throw number; }

static void expect(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "%s\n", what);
    std::exit(1);
}

int main(int count, char**) {
    gin_config_t config = gin::default_config();
    config.device = GIN_DEVICE_VIRTUAL;
    gin::Job job = std::move(gin::Job::local(1, config).front());
    gin::Kernel kernel = gin::Kernel::of<throws>("throws");
    gin::Stream stream(job);
    if (count > 1) {
        std::printf("throws\n");
        std::fflush(stdout);
        stream.launch(gin::Kernel::of<throws_a_number>("throws_a_number"), gin::cooperative(1, 1), 7);
        stream.synchronize();
        return 0;
    }
    stream.launch(kernel, gin::cooperative(1, 1), 7);
    std::string said;
    try {
        stream.synchronize();
    } catch (const gin::Error& error) {
        said = error.what();
        expect(error.status() == GIN_ERROR_DEVICE, "the status");
    }
    expect(said.find("number 7 is wrong") != std::string::npos && said.find("throws") != std::string::npos, said.c_str());
    expect(dropped == 1, "the frames of the kernel are unwound");
    stream.launch(kernel, gin::cooperative(1, 1), 0);
    stream.synchronize();
    expect(dropped == 2, "the next kernel runs");
    std::printf("passed\n");
}
