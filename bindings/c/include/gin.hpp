// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The host library of gin for C++17: classes that own the handles of gin.h, and exceptions with the text of an error.
//
// Each object is moved, not copied. Its destructor closes the handle and does not throw. A communicator that is still
// active is aborted then, and so is that of a window that an exception destroys: no rank waits for one that has left.
// docs/c.md is the page for users.

#pragma once

#include "gin.h"

#include <cstddef>
#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

// A macro of the program with a name of this header. The end of the header restores it.
#pragma push_macro("check")
#undef check

/// Ends the calling kernel on a virtual GPU with an error that has this text.
extern "C" [[noreturn]] void gin_virtual_fail(const char* text);

namespace gin {

/// The error of a call.
class Error : public std::runtime_error {
public:
    Error(gin_status_t status, const char* text) : std::runtime_error(text), status_(status) {}
    /// Returns the status code.
    gin_status_t status() const noexcept { return status_; }

private:
    gin_status_t status_;
};

/// Throws the error of a call, if it has one.
inline void check(gin_status_t status) {
    if (status != GIN_OK) throw Error(status, gin_last_error());
}

/// A handle that `Close` closes.
template <class Raw, gin_status_t (*Close)(Raw)>
class Handle {
public:
    Handle() noexcept = default;
    explicit Handle(Raw raw) noexcept : raw_(raw) {}
    Handle(Handle&& other) noexcept : raw_(std::exchange(other.raw_, Raw{0})) {}
    Handle& operator=(Handle&& other) noexcept {
        if (this != &other) {
            reset();
            raw_ = std::exchange(other.raw_, Raw{0});
        }
        return *this;
    }
    Handle(const Handle&) = delete;
    Handle& operator=(const Handle&) = delete;
    ~Handle() { reset(); }

    /// Returns the handle of gin.h, which this object keeps.
    Raw raw() const noexcept { return raw_; }
    /// Gives the handle away: the caller closes it.
    Raw release() noexcept { return std::exchange(raw_, Raw{0}); }

protected:
    void reset() noexcept {
        if (raw_.id != 0) (void)Close(std::exchange(raw_, Raw{0}));
    }
    Raw raw_{0};
};

/// Returns the defaults of a job.
inline gin_config_t default_config() { return GIN_CONFIG_INIT; }
/// Returns the defaults of a communicator.
inline gin_requirements_t default_requirements() { return GIN_REQUIREMENTS_INIT; }

/// One rank of a job.
class Job : public Handle<gin_job_t, gin_job_close> {
public:
    using Handle::Handle;

    /// Joins the job of the launcher that started this process.
    static Job from_env(const gin_config_t& config = default_config()) {
        gin_job_t raw;
        check(gin_job_from_env(&config, &raw));
        return Job(raw);
    }
    /// Joins a job by its id.
    static Job join(const gin_unique_id_t& id, uint32_t rank, uint32_t ranks,
                    const gin_config_t& config = default_config()) {
        gin_job_t raw;
        check(gin_job_join(&config, &id, rank, ranks, &raw));
        return Job(raw);
    }
    /// Joins a running job, whose ranks call `grow` with this number.
    static Job join_running(const gin_unique_id_t& id, uint32_t rank, uint32_t ranks,
                            const gin_config_t& config = default_config()) {
        gin_job_t raw;
        check(gin_job_join_running(&config, &id, rank, ranks, &raw));
        return Job(raw);
    }
    /// Joins a job over the caller's own all-gather.
    static Job over(uint32_t rank, uint32_t ranks, gin_all_gather_t all_gather, void* user,
                    const gin_config_t& config = default_config()) {
        gin_job_t raw;
        check(gin_job_over(&config, rank, ranks, all_gather, user, &raw));
        return Job(raw);
    }
    /// Makes the ranks of a job that are threads of this process.
    static std::vector<Job> local(uint32_t ranks, const gin_config_t& config = default_config()) {
        std::vector<gin_job_t> raw(ranks);
        check(gin_job_local(&config, ranks, raw.data()));
        std::vector<Job> jobs;
        for (gin_job_t job : raw) jobs.emplace_back(job);
        return jobs;
    }

    uint32_t rank() const { return numbers().first; }
    uint32_t ranks() const { return numbers().second; }
    /// Returns whether the rank runs on a virtual GPU.
    bool is_virtual() const {
        uint32_t kind;
        check(gin_job_device(raw_, &kind));
        return kind == GIN_DEVICE_VIRTUAL;
    }
    /// Waits for all ranks.
    void barrier() const { check(gin_job_barrier(raw_)); }
    /// Gathers one plain value of each rank, by rank.
    template <class T>
    std::vector<T> all_gather(const T& own) const {
        static_assert(std::is_trivially_copyable_v<T>, "the bytes of the value are sent");
        std::vector<T> all(ranks());
        check(gin_job_all_gather(raw_, &own, sizeof(T), all.data()));
        return all;
    }

    /// Returns the ranks that are known to be lost.
    std::vector<uint32_t> lost() const {
        std::vector<uint32_t> lost(ranks());
        std::size_t count;
        check(gin_job_lost(raw_, lost.data(), lost.size(), &count));
        lost.resize(count);
        return lost;
    }
    /// Makes a job of the ranks that remain. All of them call it with the same lost ranks.
    Job without(const std::vector<uint32_t>& lost, uint32_t joining_ms) const {
        gin_job_t raw;
        check(gin_job_without(raw_, lost.data(), lost.size(), joining_ms, &raw));
        return Job(raw);
    }
    /// Makes a job with processes that join as these ranks. All other ranks call it with the same numbers.
    Job grow(const std::vector<uint32_t>& joining, uint32_t joining_ms) const {
        gin_job_t raw;
        check(gin_job_grow(raw_, joining.data(), joining.size(), joining_ms, &raw));
        return Job(raw);
    }
    /// Returns the id with which processes can join this job while it runs.
    gin_unique_id_t id() const {
        gin_unique_id_t id;
        check(gin_job_id(raw_, &id));
        return id;
    }

private:
    std::pair<uint32_t, uint32_t> numbers() const {
        std::pair<uint32_t, uint32_t> numbers;
        check(gin_job_rank(raw_, &numbers.first, &numbers.second));
        return numbers;
    }
};

/// One rank's member of a communicator.
class Communicator : public Handle<gin_comm_t, gin_comm_release> {
public:
    using Handle::Handle;

    /// Creates a communicator of all ranks. Collective.
    Communicator(const Job& job, const gin_requirements_t& requirements = default_requirements()) {
        check(gin_comm_create(job.raw(), &requirements, &raw_));
    }
    /// Returns the argument of kernels: a `gin::Comm` of gin_device.cuh takes it.
    gin_device_comm_t device() const {
        gin_device_comm_t device;
        check(gin_comm_device(raw_, &device));
        return device;
    }
    /// Throws the fault that ended the communicator, if there is one.
    void check_fault() const { check(gin_comm_check(raw_)); }
    /// Ends every wait, on all ranks.
    void abort() const { check(gin_comm_abort(raw_)); }
    /// Carries out requests of kernels, if the job has no progress threads. Returns whether there was anything to do.
    bool progress() const {
        uint32_t worked;
        check(gin_comm_progress(raw_, &worked));
        return worked != 0;
    }
    /// Returns the statistics of a context.
    gin_stats_t stats(uint32_t context = 0) const {
        gin_stats_t stats;
        check(gin_comm_stats(raw_, context, &stats));
        return stats;
    }
    /// Ends the communicator in an orderly way. Collective.
    void destroy() {
        check(gin_comm_destroy(raw_));
        raw_ = {0};
    }
};

/// The argument of kernels for a window of elements of type `T`: a `gin::Window<T>` of gin_device.cuh takes it.
template <class T>
struct DeviceWindow : gin_device_window_t {};

/// One rank's part of a window of elements of type `T`.
///
/// Its end is collective, as `close` is. If an exception destroys it, the other ranks do not know of that: the end
/// aborts the communicator instead, and waits for nobody.
template <class T>
class HostWindow : public Handle<gin_window_t, gin_window_close> {
    static_assert(std::is_trivially_copyable_v<T>, "peers copy the bytes of elements");

public:
    using Handle::Handle;

    /// Allocates `count` elements, zeroed. Collective.
    HostWindow(const Communicator& comm, std::size_t count, uint32_t flags = 0) {
        check(gin_window_alloc(comm.raw(), count * sizeof(T), flags, &raw_));
    }
    /// Registers memory of the caller, which outlives the window. Collective.
    HostWindow(const Communicator& comm, T* memory, std::size_t count, uint32_t flags = 0) {
        check(gin_window_register(comm.raw(), memory, count * sizeof(T), flags, &raw_));
    }
    HostWindow(HostWindow&& other) noexcept : Handle(std::move(other)) {}
    HostWindow& operator=(HostWindow&& other) noexcept {
        Handle::operator=(std::move(other));
        return *this;
    }
    ~HostWindow() {
        if (raw_.id != 0 && std::uncaught_exceptions() > exceptions_) (void)gin_window_release(release());
    }
    /// Returns the argument of kernels.
    DeviceWindow<T> device() const {
        DeviceWindow<T> device;
        check(gin_window_device(raw_, &device));
        return device;
    }
    /// Returns the device address of this rank's part.
    T* data() const {
        void* memory;
        check(gin_window_memory(raw_, &memory, nullptr));
        return static_cast<T*>(memory);
    }
    /// Returns the number of elements of this rank's part.
    std::size_t size() const {
        uint64_t bytes;
        check(gin_window_memory(raw_, nullptr, &bytes));
        return bytes / sizeof(T);
    }
    /// Copies values to the elements from `start` on.
    void write(const std::vector<T>& values, std::size_t start = 0) const {
        check(gin_window_write(raw_, start * sizeof(T), values.data(), values.size() * sizeof(T)));
    }
    /// Returns all elements of this rank's part.
    std::vector<T> read() const {
        std::vector<T> values(size());
        check(gin_window_read(raw_, 0, values.data(), values.size() * sizeof(T)));
        return values;
    }
    /// Deregisters the window. Collective.
    void close() {
        check(gin_window_close(raw_));
        raw_ = {0};
    }

private:
    // The exceptions that were under way when the object was made: one more destroys it.
    int exceptions_ = std::uncaught_exceptions();
};

template <class... P>
class KernelOf;

/// A kernel.
class Kernel : public Handle<gin_kernel_t, gin_kernel_close> {
public:
    using Handle::Handle;

    /// Makes a kernel of a function in C++, `void function(P...)`, for the virtual GPU: a `KernelOf<P...>`. If it throws
    /// a `std::exception`, the launch ends with an error that has its text.
    template <auto Function>
    static auto of(const char* name) {
        return Adapter<Function>::make(name);
    }

private:
    template <auto Function>
    struct Adapter;
    template <class... P, void (*Function)(P...)>
    struct Adapter<Function> {
        static_assert((std::is_trivially_copyable_v<P> && ...), "parameters of kernels are copied byte by byte");
        template <std::size_t... I>
        static void spread(const void* const* params, std::index_sequence<I...>) {
            Function(*static_cast<const P*>(params[I])...);
        }
        // An exception of another kind ends the process: Rust cannot catch it.
        static void call(const void* const* params) {
            try {
                spread(params, std::index_sequence_for<P...>{});
            } catch (const std::exception& error) {
                gin_virtual_fail(error.what());
            }
        }
        static KernelOf<P...> make(const char* name) {
            const std::size_t sizes[] = {sizeof(P)..., 0};
            gin_kernel_t raw;
            check(gin_kernel_of_function(call, name, sizes, sizeof...(P), &raw));
            return KernelOf<P...>(raw);
        }
    };
};

/// A kernel with parameters of these types. As a `Kernel` it loses them.
template <class... P>
class KernelOf : public Kernel {
public:
    using Kernel::Kernel;
};

/// Kernels that were loaded together.
class Module : public Handle<gin_module_t, gin_module_close> {
public:
    using Handle::Handle;

    /// Loads the Rust kernels that are linked into the program, or PTX text or a cubin.
    explicit Module(const Job& job, const void* image = nullptr, std::size_t bytes = 0) {
        check(gin_module_load(job.raw(), image, bytes, &raw_));
    }
    /// Returns the kernel of this name.
    Kernel kernel(const char* name) const {
        gin_kernel_t raw;
        check(gin_module_kernel(raw_, name, &raw));
        return Kernel(raw);
    }
};

/// Captured work of a stream, which runs each time it is launched.
class Graph : public Handle<gin_graph_t, gin_graph_close> {
public:
    using Handle::Handle;
};

/// A stream.
class Stream : public Handle<gin_stream_t, gin_stream_close> {
public:
    using Handle::Handle;

    explicit Stream(const Job& job) { check(gin_stream_create(job.raw(), &raw_)); }
    /// Uses a `cudaStream_t` of the program, which outlives this object.
    static Stream from_cuda(const Job& job, void* stream) {
        gin_stream_t raw;
        check(gin_stream_from_cuda(job.raw(), stream, &raw));
        return Stream(raw);
    }
    /// Launches a kernel. Arguments are plain values, of the kernel's types. Refuses communicators and windows, as
    /// `device()` returns them, that are closed or of another process.
    template <class... A>
    void launch(const Kernel& kernel, const gin_shape_t& shape, const A&... arguments) const {
        static_assert((std::is_trivially_copyable_v<A> && ...), "arguments of kernels are copied byte by byte");
        refuse_foreign(arguments...);
        const gin_arg_t all[] = {{&arguments, sizeof(A)}..., {nullptr, 0}};
        check(gin_launch(raw_, kernel.raw(), &shape, all, sizeof...(A)));
    }
    /// Launches a kernel whose types are known. Converts arguments to its parameters, as a call does.
    template <class... P, class... A>
    void launch(const KernelOf<P...>& kernel, const gin_shape_t& shape, const A&... arguments) const {
        static_assert(sizeof...(A) == sizeof...(P), "the kernel takes another number of arguments");
        if constexpr (sizeof...(A) == sizeof...(P)) {
            static_assert((std::is_convertible_v<const A&, P> && ...), "an argument has another type than its parameter");
            refuse_foreign(arguments...);
            auto pass = [&](const P&... values) {
                const gin_arg_t all[] = {{&values, sizeof(P)}..., {nullptr, 0}};
                check(gin_launch(raw_, kernel.raw(), &shape, all, sizeof...(P)));
            };
            pass(arguments...);
        }
    }
    /// Makes a graph of the work that `work()` puts on the stream, which does not run now.
    template <class Work>
    Graph capture(Work&& work) const {
        check(gin_stream_begin_capture(raw_));
        gin_graph_t raw{0};
        try {
            work();
        } catch (...) {
            if (gin_stream_end_capture(raw_, &raw) == GIN_OK) (void)gin_graph_close(raw);
            throw;
        }
        check(gin_stream_end_capture(raw_, &raw));
        return Graph(raw);
    }
    /// Launches a graph. What its calls use lives until it has run.
    void launch(const Graph& graph) const { check(gin_graph_launch(graph.raw(), raw_)); }
    /// Waits until all work is done.
    void synchronize() const { check(gin_stream_synchronize(raw_)); }

private:
    template <class... A>
    static void refuse_foreign(const A&... arguments) {
        std::size_t index = 0;
        (refuse_one(index++, arguments), ...);
        (void)index;
    }
    template <class A>
    static void refuse_one(std::size_t index, const A& argument) {
        if constexpr (std::is_same_v<A, gin_device_comm_t>) {
            refuse(gin_device_comm_check(&argument), index, "communicator");
        } else if constexpr (std::is_base_of_v<gin_device_window_t, A>) {
            refuse(gin_device_window_check(&argument), index, "window");
        } else {
            (void)index, (void)argument;
        }
    }
    static void refuse(gin_status_t status, std::size_t index, const char* what) {
        if (status != GIN_ERROR_HANDLE) return check(status);
        std::string text = "gin::Stream::launch: argument " + std::to_string(index) + " is no " + what +
                           " of this process: it is closed, or of another process";
        throw Error(status, text.c_str());
    }
};

/// Returns the shape of `blocks` blocks of `threads` threads that are all resident at once.
inline gin_shape_t cooperative(uint32_t blocks, uint32_t threads) {
    return gin_shape_t{{blocks, 1, 1}, {threads, 1, 1}, 0, 1};
}

}  // namespace gin

#pragma pop_macro("check")
