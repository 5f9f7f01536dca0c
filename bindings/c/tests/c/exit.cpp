// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Objects of gin with static lifetime, which are destroyed after the thread-local values of the main thread. The
// program ends with status 7, and says nothing.

#include "gin.hpp"

#include <cstdlib>
#include <cstring>
#include <thread>

int main(int, char** arguments) {
    gin_config_t config = gin::default_config();
    config.device = GIN_DEVICE_VIRTUAL;
    static std::vector<gin::Job> jobs = gin::Job::local(1, config);
    static gin::Communicator comm(jobs[0]);
    static gin::HostWindow<int> window(comm, 4);
    static gin::Stream stream(jobs[0]);
    if (std::strcmp(arguments[1], "exit") == 0) std::exit(7);
    if (std::strcmp(arguments[1], "thread") == 0) std::thread([] { std::exit(7); }).join();
    return 7;
}
