// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The classes of gin.hpp own their handles, and throw the errors of calls.

#include "gin.hpp"

#include <cassert>
#include <cstdio>
#include <cstring>

int main() {
    gin_config_t config = gin::default_config();
    config.device = GIN_DEVICE_VIRTUAL;
    gin_comm_t comm_left;
    gin_window_t window_left;
    {
        gin::Job job = std::move(gin::Job::local(1, config).front());
        assert(job.rank() == 0 && job.ranks() == 1 && job.is_virtual() && job.all_gather(7) == std::vector<int>{7});
        gin::Communicator first(job);
        gin::Communicator comm = std::move(first);
        assert(first.raw().id == 0 && comm.raw().id != 0);
        gin::HostWindow<float> window(comm, 8);
        window.write({1, 2, 3}, 5);
        assert(window.size() == 8 && window.read()[7] == 3 && window.data() != nullptr);
        try {
            window.write({1, 2, 3}, 6);
            assert(!"past the end");
        } catch (const gin::Error& error) {
            assert(error.status() == GIN_ERROR_ARGUMENT && std::strstr(error.what(), "24 to 36"));
        }
        comm_left = comm.raw();
        window_left = window.raw();
        // Dropped without `destroy`: the window is closed first, then the communicator is aborted.
    }
    assert(gin_comm_check(comm_left) == GIN_ERROR_HANDLE);
    assert(gin_window_close(window_left) == GIN_ERROR_HANDLE);
    std::printf("passed\n");
}
