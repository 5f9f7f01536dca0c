// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Tokens of the tests of gin_nccl_ep.h, memory of the device, and the results that they must have, computed without gin.

#pragma once

#include "gin_nccl_ep.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

/// Throws the line of a condition that does not hold.
#define HOLDS(condition)                                                                                  \
    do {                                                                                                  \
        if (!(condition)) throw std::runtime_error(std::to_string(__LINE__) + ": " #condition);           \
    } while (0)

/// Throws the text of a call that fails.
#define OK(comm, call)                                                                                    \
    do {                                                                                                  \
        ncclResult_t result = (call);                                                                     \
        if (result != ncclSuccess)                                                                        \
            throw std::runtime_error(std::to_string(__LINE__) + ": " #call ": " + std::to_string(int(result)) + ": " + \
                                     ncclGetLastError(comm));                                             \
    } while (0)

constexpr uint32_t HIDDEN = 128, TOPK = 3, EXPERTS = 8, ROOM = 6;

inline uint16_t bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float from_bf16(uint16_t half) {
    uint32_t bits = uint32_t(half) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

/// The tokens of a rank in a round. All sums of results are exact in BF16.
struct Batch {
    uint32_t count;
    std::vector<float> rows, weights;
    std::vector<int64_t> ids;

    Batch(uint32_t rank, uint32_t round) {
        uint64_t state = 0x9e3779b97f4a7c15u * (1 + rank + 64 * uint64_t(round));
        auto below = [&](uint64_t end) {
            state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
            return (state * 0x2545f4914f6cdd1du >> 33) % end;
        };
        for (int i = 0; i < 8; i++) (void)below(2);
        // A rank without tokens, and a rank with all that it may have.
        count = round % 3 == 0 ? uint32_t(below(ROOM + 1)) : (rank + round) % 2 == 0 ? ROOM : 0;
        for (uint32_t i = 0; i < count * HIDDEN; i++) rows.push_back(float(int(below(5)) - 2));
        for (uint32_t i = 0; i < count; i++) {
            uint32_t first = uint32_t(below(EXPERTS));
            for (uint32_t k = 0; k < TOPK; k++) {
                bool is_none = below(6) == 0;
                ids.push_back(is_none ? -1 : int64_t((first + k * 3) % EXPERTS));
                weights.push_back(std::ldexp(1.0f, -int(below(3))));
            }
        }
    }
    float at(uint32_t token, uint32_t column) const { return rows[token * HIDDEN + column]; }
};

/// The result of an expert, of all ranks, for a value.
inline float expert(uint32_t number, float value) { return value * float(1 + number % 3); }

/// The sum of a token's results, each times its weight.
inline float sum_of(const Batch& batch, uint32_t token, uint32_t column) {
    float sum = 0;
    for (uint32_t k = 0; k < TOPK; k++) {
        int64_t id = batch.ids[token * TOPK + k];
        if (id >= 0) sum += batch.weights[token * TOPK + k] * expert(uint32_t(id), batch.at(token, column));
    }
    return sum;
}

/// Memory of the device with elements of a type, and its descriptor.
template <class T>
class Tensor {
public:
    Tensor(ncclDataType_t type, std::vector<size_t> sizes) : sizes_(std::move(sizes)), count_(1) {
        for (size_t size : sizes_) count_ *= size;
        allocate(count_ * sizeof(T) + 16);
        tensor_ = NCCL_EP_TENSOR_INIT;
        tensor_.ndim = unsigned(sizes_.size()), tensor_.datatype = type, tensor_.sizes = sizes_.data();
        tensor_.data = data_;
        fill(std::vector<T>(count_));
    }
    Tensor(ncclDataType_t type, std::vector<size_t> sizes, const std::vector<T>& values) : Tensor(type, std::move(sizes)) {
        HOLDS(values.size() == count_);
        fill(values);
    }
    Tensor(const Tensor&) = delete;
    ncclEpTensor_t* operator&() { return &tensor_; }

#ifdef CUDART_VERSION
    ~Tensor() { (void)cudaFree(data_); }
    void fill(const std::vector<T>& values) {
        HOLDS(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice) == cudaSuccess);
    }
    std::vector<T> read() const {
        std::vector<T> values(count_);
        HOLDS(cudaMemcpy(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost) == cudaSuccess);
        return values;
    }

private:
    void allocate(size_t bytes) { HOLDS(cudaMalloc(&data_, bytes) == cudaSuccess); }
#else
    ~Tensor() { std::free(data_); }
    void fill(const std::vector<T>& values) { std::copy(values.begin(), values.end(), static_cast<T*>(data_)); }
    std::vector<T> read() const { return {static_cast<T*>(data_), static_cast<T*>(data_) + count_}; }

private:
    void allocate(size_t bytes) { data_ = std::aligned_alloc(16, (bytes + 15) / 16 * 16); }
#endif
    std::vector<size_t> sizes_;
    size_t count_;
    void* data_ = nullptr;
    ncclEpTensor_t tensor_;
};

/// A stream of the rank's device.
class Stream {
public:
#ifdef CUDART_VERSION
    explicit Stream(ncclComm_t) { HOLDS(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking) == cudaSuccess); }
    ~Stream() { (void)cudaStreamDestroy(stream_); }
    void synchronize() const { HOLDS(cudaStreamSynchronize(stream_) == cudaSuccess); }
    operator cudaStream_t() const { return stream_; }
    /// Captures work, and returns a function that runs it.
    template <class Work>
    std::function<void()> capture(Work work) const {
        cudaGraph_t graph;
        cudaGraphExec_t made;
        HOLDS(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed) == cudaSuccess);
        work();
        HOLDS(cudaStreamEndCapture(stream_, &graph) == cudaSuccess);
        HOLDS(cudaGraphInstantiate(&made, graph, 0) == cudaSuccess);
        return [this, made] { HOLDS(cudaGraphLaunch(made, stream_) == cudaSuccess); };
    }

private:
    cudaStream_t stream_;
#else
    explicit Stream(ncclComm_t comm) { HOLDS(gin_stream_create(ginNcclOf(comm)->job, &stream_) == GIN_OK); }
    ~Stream() { (void)gin_stream_close(stream_); }
    void synchronize() const { HOLDS(gin_stream_synchronize(stream_) == GIN_OK); }
    operator cudaStream_t() const { return ginNcclStream(stream_); }
    template <class Work>
    std::function<void()> capture(Work work) const {
        gin_graph_t graph;
        HOLDS(gin_stream_begin_capture(stream_) == GIN_OK);
        work();
        HOLDS(gin_stream_end_capture(stream_, &graph) == GIN_OK);
        return [this, graph] { HOLDS(gin_graph_launch(graph, stream_) == GIN_OK); };
    }

private:
    gin_stream_t stream_;
#endif
};

/// What a rank of each case has.
struct Rank {
    ncclComm_t comm;
    uint32_t rank, ranks, local;
    Stream stream;
    Rank(ncclComm_t comm, uint32_t rank, uint32_t ranks)
        : comm(comm), rank(rank), ranks(ranks), local(EXPERTS / ranks), stream(comm) {}

    ncclEpGroupConfig_t config(ncclEpAlgorithm_t algorithm) const {
        ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
        config.algorithm = algorithm, config.num_experts = EXPERTS, config.max_dispatch_tokens_per_rank = ROOM;
        config.max_token_bytes = 4 * HIDDEN;
        // A busy machine may stop a thread for seconds.
        config.timeout_ns = 60000000000u;
        return config;
    }
    bool is_here(int64_t id) const { return id >= 0 && uint32_t(id) / local == rank; }
};

/// A received row: its source, token and position of the id.
struct Row {
    uint32_t source, token, k;
};

/// Returns the rows that a rank receives for an expert of its own, in gin's order.
inline std::vector<Row> rows_of(const std::vector<Batch>& batches, const Rank& r, uint32_t local) {
    std::vector<Row> rows;
    for (uint32_t source = 0; source < r.ranks; source++)
        for (uint32_t i = 0; i < batches[source].count * TOPK; i++)
            if (batches[source].ids[i] == int64_t(r.rank * r.local + local)) rows.push_back({source, i / TOPK, i % TOPK});
    return rows;
}

/// Returns the tokens that a rank receives from a source.
inline std::vector<uint32_t> tokens_from(const Batch& batch, const Rank& r) {
    std::vector<uint32_t> tokens;
    for (uint32_t token = 0; token < batch.count; token++) {
        bool is_here = false;
        for (uint32_t k = 0; k < TOPK; k++) is_here |= r.is_here(batch.ids[token * TOPK + k]);
        if (is_here) tokens.push_back(token);
    }
    return tokens;
}

inline std::vector<Batch> all_batches(const Rank& r, uint32_t round) {
    std::vector<Batch> batches;
    for (uint32_t rank = 0; rank < r.ranks; rank++) batches.emplace_back(rank, round);
    return batches;
}

inline std::vector<uint16_t> halves(const std::vector<float>& values) {
    std::vector<uint16_t> made;
    for (float value : values) made.push_back(bf16(value));
    return made;
}

/// Compares the sums of a rank's tokens with the expected ones.
inline void check_sums(const Batch& batch, const std::vector<uint16_t>& found) {
    HOLDS(found.size() == batch.count * HIDDEN);
    for (uint32_t i = 0; i < batch.count * HIDDEN; i++)
        if (from_bf16(found[i]) != sum_of(batch, i / HIDDEN, i % HIDDEN))
            throw std::runtime_error("wrong sum of token " + std::to_string(i / HIDDEN) + ": " +
                                     std::to_string(from_bf16(found[i])));
}

/// The tokens of a rank, in memory.
struct Given {
    Batch batch;
    Tensor<uint16_t> rows;
    Tensor<int64_t> wide;
    Tensor<int32_t> narrow;
    Tensor<float> weights;
    explicit Given(const Batch& of)
        : batch(of),
          rows(ncclBfloat16, {of.count, HIDDEN}, halves(of.rows)),
          wide(ncclInt64, {of.count, TOPK}, of.ids),
          narrow(ncclInt32, {of.count, TOPK}, std::vector<int32_t>(of.ids.begin(), of.ids.end())),
          weights(ncclFloat32, {of.count, TOPK}, of.weights) {}
};

inline ncclEpGroup_t group_of(Rank& r, ncclEpAlgorithm_t algorithm) {
    ncclEpGroup_t group;
    ncclEpGroupConfig_t config = r.config(algorithm);
    OK(r.comm, ncclEpCreateGroup(&group, r.comm, &config));
    return group;
}

/// Makes the results of the experts in zones, and compares the received rows. Returns the results.
inline std::vector<uint16_t> results_of_zones(const Rank& r, const std::vector<Batch>& batches,
                                              const std::vector<uint16_t>& found, const std::vector<uint32_t>& firsts,
                                              bool is_weighted) {
    std::vector<uint16_t> results(found.size());
    for (uint32_t local = 0; local < r.local; local++) {
        std::vector<Row> rows = rows_of(batches, r, local);
        for (uint32_t i = 0; i < rows.size(); i++)
            for (uint32_t column = 0; column < HIDDEN; column++) {
                const Batch& batch = batches[rows[i].source];
                size_t place = size_t(firsts[local] + i) * HIDDEN + column;
                HOLDS(found[place] == bf16(batch.at(rows[i].token, column)));
                float factor = is_weighted ? batch.weights[rows[i].token * TOPK + rows[i].k] : 1;
                float result = expert(r.rank * r.local + local, from_bf16(found[place]));
                results[place] = bf16(factor * result);
            }
    }
    return results;
}

inline void check_counts(const Rank& r, const std::vector<Batch>& batches, const std::vector<int32_t>& counts) {
    for (uint32_t local = 0; local < r.local; local++)
        HOLDS(counts[local] == int32_t(rows_of(batches, r, local).size()));
}


/// Makes the sums of a rank's experts for rows at `place(source, row)`, and compares rows, ids and weights.
template <class Place>
std::vector<uint16_t> results_of_ranks(const Rank& r, const std::vector<Batch>& batches,
                                              const std::vector<uint16_t>& found, const std::vector<int64_t>& ids,
                                              const std::vector<float>& weights, int64_t first_expert, Place place_of) {
    std::vector<uint16_t> results(found.size());
    for (uint32_t source = 0; source < r.ranks; source++) {
        const Batch& batch = batches[source];
        std::vector<uint32_t> tokens = tokens_from(batch, r);
        for (uint32_t row = 0; row < tokens.size(); row++) {
            size_t place = place_of(source, row);
            for (uint32_t k = 0; k < TOPK; k++) {
                int64_t id = batch.ids[tokens[row] * TOPK + k];
                bool is_here = r.is_here(id);
                HOLDS(ids[place * TOPK + k] == (is_here ? id - r.rank * r.local + first_expert : -1));
                HOLDS(weights[place * TOPK + k] == (is_here ? batch.weights[tokens[row] * TOPK + k] : 0));
            }
            for (uint32_t column = 0; column < HIDDEN; column++) {
                float value = from_bf16(found[place * HIDDEN + column]), sum = 0;
                HOLDS(value == batch.at(tokens[row], column));
                for (uint32_t k = 0; k < TOPK; k++) {
                    int64_t id = batch.ids[tokens[row] * TOPK + k];
                    if (r.is_here(id)) sum += weights[place * TOPK + k] * expert(uint32_t(id), value);
                }
                results[place * HIDDEN + column] = bf16(sum);
            }
        }
    }
    return results;
}

/// A part of a program, which each rank runs.
struct Case {
    const char* name;
    void (*body)(Rank&);
};

/// Runs all cases as one rank, whose communicator `make` makes. Returns 1 if one failed, else 0.
inline int run(const std::vector<Case>& cases, int rank, int ranks, const std::function<void(ncclComm_t*)>& make) {
    ncclComm_t comm = nullptr;
    const char* name = "start";
    try {
#ifdef CUDART_VERSION
        int gpus = 1;
        HOLDS(cudaGetDeviceCount(&gpus) == cudaSuccess && cudaSetDevice(rank % gpus) == cudaSuccess);
#endif
        make(&comm);
        {
            Rank one(comm, uint32_t(rank), uint32_t(ranks));
            for (const Case& of : cases) {
                name = of.name;
                of.body(one);
            }
        }
        name = "ncclCommDestroy";
        OK(nullptr, ncclCommDestroy(comm));
        return 0;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s, rank %d of %d: %s\n", name, rank, ranks, error.what());
        // Others wait for this rank no longer.
        if (comm != nullptr) (void)gin_job_abort(ginNcclOf(comm)->job);
        if (comm != nullptr) (void)ncclCommAbort(comm);
        return 1;
    }
}

/// Runs ranks that are threads of this process. With a network, loads and stores reach no other rank.
inline int threads_of(const std::vector<Case>& cases, int ranks, bool has_network) {
    gin_config_t config = GIN_CONFIG_INIT;
    config.lsa_size = has_network;
    std::vector<gin_job_t> jobs(ranks);
    if (gin_job_local(&config, uint32_t(ranks), jobs.data()) != GIN_OK) throw std::runtime_error(gin_last_error());
    std::vector<std::thread> threads;
    std::atomic<int> failed{0};
    for (int rank = 0; rank < ranks; rank++)
        threads.emplace_back([&, rank] {
            failed |= run(cases, rank, ranks, [&](ncclComm_t* comm) { OK(nullptr, ginNcclCommInit(comm, jobs[rank], nullptr)); });
        });
    for (std::thread& thread : threads) thread.join();
    for (gin_job_t job : jobs) (void)gin_job_close(job);
    return failed;
}

/// Runs one rank of processes that meet by NCCL's calls. Rank 0 writes the id to a file.
inline int process_of(const std::vector<Case>& cases, const std::string& path, int rank, int ranks) {
    return run(cases, rank, ranks, [&](ncclComm_t* comm) {
        ncclUniqueId id;
        if (rank == 0) {
            OK(nullptr, ncclGetUniqueId(&id));
            std::ofstream(path + ".new", std::ios::binary).write(id.internal, sizeof(id.internal));
            HOLDS(std::rename((path + ".new").c_str(), path.c_str()) == 0);
        }
        std::ifstream file;
        for (int time = 0; time < 3000 && !file.is_open(); time++) {
            if (time > 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
            file.open(path, std::ios::binary);
        }
        HOLDS(file.read(id.internal, sizeof(id.internal)));
        OK(nullptr, ncclCommInitRank(comm, ranks, id, rank));
    });
}

/// Runs the cases as the program's arguments say.
inline int run_all(const std::vector<Case>& cases, int count, char** words) try {
    int failed = 0;
    const char *rank = std::getenv("GIN_RANK"), *ranks = std::getenv("GIN_RANKS");
    if (count > 1 && rank != nullptr && ranks != nullptr) {
        failed = process_of(cases, words[1], std::atoi(rank), std::atoi(ranks));
    } else {
        std::vector<int> all;
        bool has_network = false;
        for (int i = 1; i < count; i++) {
            if (std::strcmp(words[i], "network") == 0)
                has_network = true;
            else
                all.push_back(std::atoi(words[i]));
        }
        if (all.empty()) all = {1, 2, 4};
        for (int ranks_of : all) failed |= threads_of(cases, ranks_of, has_network);
    }
    std::printf("%s\n", failed ? "failed" : "passed");
    return failed;
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
