// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Wrong calls of expert parallelism, reports of kernels, silent and aborted ranks. Two ranks on virtual GPUs.

#include "ep.hpp"

#include <chrono>

/// Checks the status of a call and a part of its text. No text has names of Rust.
static void fails(gin_status_t status, gin_status_t expected, const char* part) {
    std::string text = gin_last_error();
    if (status != expected || text.find(part) == std::string::npos || text.find("::") != std::string::npos)
        throw std::runtime_error("status " + std::to_string(status) + ", not " + std::to_string(expected) + " with \"" +
                                 part + "\": " + text);
}

struct Rank {
    const gin::Job& job;
    uint32_t rank = job.rank();
    gin::Communicator comm{job};
    gin::Stream stream{job};
    Elements<uint16_t> rows{ROOM * HIDDEN}, output{ROOM * HIDDEN};
    Elements<int32_t> ids{ROOM * TOPK};

    gin_ep_config_t config() const {
        gin_ep_config_t config = gin::ep::config(EXPERTS, HIDDEN, TOPK);
        config.tokens = ROOM, config.deadline_ms = 60000;
        return config;
    }
    gin_ep_tokens_t tokens() {
        gin_ep_tokens_t tokens = gin::ep::tokens();
        tokens.count = ROOM, tokens.rows = rows.memory(), tokens.ids = ids.memory();
        return tokens;
    }
    gin_ep_combine_t sums() { return gin::ep::combine(output.memory()); }
};

static gin_stream_t stream_of_other_rank;

static void arguments(Rank& r) {
    gin::ep::Group group(r.comm, r.config()), other(r.comm, r.config());
    gin::ep::Slot slot(group, 0), of_other(other, 0);
    // A refused call changes nothing, so both ranks make the last one together.
    auto refused = [&](gin_ep_tokens_t tokens, const char* part) {
        fails(gin_ep_exchange(slot.raw(), r.stream.raw(), &tokens), GIN_ERROR_ARGUMENT, part);
        fails(gin_ep_dispatch(slot.raw(), r.stream.raw(), &tokens), GIN_ERROR_ARGUMENT, part);
        gin_ep_plan_t plan;
        fails(gin_ep_plan_create(slot.raw(), r.stream.raw(), &tokens, &plan), GIN_ERROR_ARGUMENT, part);
    };
    gin_ep_tokens_t tokens = r.tokens();
    fails(gin_ep_exchange(slot.raw(), r.stream.raw(), nullptr), GIN_ERROR_ARGUMENT, "`tokens` is null");
    tokens.size = 8, refused(tokens, "tokens.size is 8, not"), tokens = r.tokens();
    tokens.id_bits = 16, refused(tokens, "tokens.id_bits is 16: ids have 32 or 64 bits"), tokens = r.tokens();
    tokens.count = ROOM + 1, refused(tokens, "the number of tokens of a batch is 10; the limit is at most 9");
    tokens = r.tokens(), tokens.rows.bytes--;
    refused(tokens, "the memory of rows has 2303 bytes, 2304 are needed");
    tokens = r.tokens(), tokens.rows.data = r.rows.data() + 1;
    refused(tokens, "the memory of rows begins 2 bytes past a multiple of 16");
    tokens = r.tokens(), tokens.rows.data = nullptr;
    refused(tokens, "`tokens.rows` is null and has 2304 bytes: pass an address, or 0 bytes");
    tokens = r.tokens(), tokens.rows.bytes = UINT64_MAX;
    refused(tokens, "which end past the last address");
    tokens = r.tokens(), tokens.ids.bytes = 8, refused(tokens, "the memory of ids has 8 bytes, 108 are needed");
    tokens = r.tokens(), tokens.id_bits = 64, refused(tokens, "the memory of ids has 108 bytes, 216 are needed");
    tokens = r.tokens(), tokens.weights = gin::ep::memory(r.ids.data(), 1);
    refused(tokens, "the memory of weights has 4 bytes, 108 are needed");
    tokens = r.tokens(), tokens.scales = r.rows.memory();
    refused(tokens, "tokens with scales: only GIN_EP_OPAQUE with `scale_bytes` takes them");
    tokens = r.tokens(), tokens.count_at = r.ids.memory();
    refused(tokens, "tokens.count is 9, and `count_at` or `plan` has the number: leave one out");
    tokens.count = 0, tokens.count_at.bytes = 2, refused(tokens, "the memory of the number of tokens has 2 bytes");

    gin_ep_tokens_t none = r.tokens();
    none.count = 0;
    gin::ep::Plan plan = of_other.plan(r.stream, none);
    tokens = none, tokens.plan = plan.raw();
    fails(gin_ep_exchange(slot.raw(), r.stream.raw(), &tokens), GIN_ERROR_ARGUMENT, "is of another group");
    tokens.count_at = r.ids.memory(), refused(tokens, "is of another group");
    gin::ep::Plan own = slot.plan(r.stream, none);
    tokens.plan = own.raw(), refused(tokens, "tokens.count_at and tokens.plan both have the number");
    tokens = none, tokens.plan = {own.raw().id + (1ull << 32)};
    fails(gin_ep_exchange(slot.raw(), r.stream.raw(), &tokens), GIN_ERROR_HANDLE, "is closed, or of another process");
    tokens.plan = {slot.raw().id};
    fails(gin_ep_exchange(slot.raw(), r.stream.raw(), &tokens), GIN_ERROR_HANDLE, "is a slot, not a plan");

    gin::ep::Permuted layout(other, GIN_EP_FLAT, 4);
    fails(gin_ep_exchange_into(slot.raw(), r.stream.raw(), &none, layout.raw()), GIN_ERROR_ARGUMENT, "of another group");
    fails(gin_ep_exchange_into(slot.raw(), r.stream.raw(), &none, {0}), GIN_ERROR_HANDLE, "the layout is null");
    gin_ep_permuted_t permuted;
    auto create = [&](uint32_t kind, uint32_t rows, uint32_t align, const char* part) {
        fails(gin_ep_permuted_create(group.raw(), kind, rows, align, &permuted), GIN_ERROR_ARGUMENT, part);
    };
    create(6, 1, 0, "layout is 6: there are 0 to 5");
    create(GIN_EP_FLAT, 0, 0, "the number of rows of a layout is 0; the limit is at least 1");
    create(GIN_EP_FLAT, 1, 8, "align is 8: leave it 0, or use GIN_EP_EXPERT_MAJOR_PACKED");
    create(GIN_EP_EXPERT_MAJOR_PACKED, 1, 3, "the alignment of zones is 3; the limit is a power of two");

    auto placed = [&](const gin_ep_permuted_into_t& into, const char* part) {
        fails(gin_ep_permuted_with_memory(layout.raw(), &into, &permuted), GIN_ERROR_ARGUMENT, part);
    };
    gin_ep_permuted_into_t into = gin::ep::permuted_into();
    into.rows = gin::ep::memory(r.rows.data(), 8), placed(into, "the memory of permuted rows has 16 bytes");
    into = gin::ep::permuted_into(), into.tokens = r.rows.memory(), placed(into, "use the layout with fixed zones");
    into = gin::ep::permuted_into(), into.size = 8, placed(into, "begin with GIN_EP_PERMUTED_INTO_INIT");
    fails(gin_ep_permuted_with_memory(layout.raw(), nullptr, &permuted), GIN_ERROR_ARGUMENT, "`into` is null");
    fails(gin_ep_permuted_with_capacity(layout.raw(), 5, &permuted), GIN_ERROR_ARGUMENT, "the limit is at most 4");
    gin::ep::Permuted fixed(group, GIN_EP_EXPERT_MAJOR_FIXED);
    fails(gin_ep_permuted_with_capacity(fixed.raw(), 1, &permuted), GIN_ERROR_ARGUMENT, "fixed places");
    slot.exchange(r.stream, r.tokens());
    auto stored = [&](const gin_ep_metadata_t& metadata, const char* part) {
        fails(gin_ep_store_metadata(slot.raw(), r.stream.raw(), fixed.raw(), &metadata), GIN_ERROR_ARGUMENT, part);
    };
    gin_ep_metadata_t metadata = gin::ep::metadata();
    metadata.experts = r.rows.memory(), stored(metadata, "the experts of an expert-major layout");
    metadata = gin::ep::metadata(), metadata.tokens = gin::ep::memory(r.rows.data(), 2);
    stored(metadata, "the memory of the tokens of rows has 4 bytes");
    metadata = gin::ep::metadata(), metadata.id_bits = 16, stored(metadata, "experts have 32 or 64 bits");
    metadata = gin::ep::metadata(), metadata.size = 8, stored(metadata, "begin with GIN_EP_METADATA_INIT");
    slot.end();
    fails(gin_ep_store_metadata(slot.raw(), r.stream.raw(), fixed.raw(), &metadata), GIN_ERROR_ARGUMENT, "GIN_EP_METADATA_INIT");
    metadata = gin::ep::metadata();
    fails(gin_ep_store_metadata(slot.raw(), r.stream.raw(), fixed.raw(), &metadata), GIN_ERROR_STATE, "slot 0 has no dispatch");
    gin_memory_t nowhere = {nullptr, 8};
    gin_ep_grouped_t grouped;
    fails(gin_ep_grouped_create(group.raw(), 8, 0, &grouped), GIN_ERROR_ARGUMENT, "configure `combine_at_source`");
    fails(gin_ep_grouped_create(group.raw(), 9, 0, &grouped), GIN_ERROR_ARGUMENT, "a multiple of 8, at least 8");
    gin_ep_overlapped_t overlapped;
    fails(gin_ep_overlapped_create(group.raw(), 0, &overlapped), GIN_ERROR_ARGUMENT, "configure `combine_at_source`");
    gin_ep_experts_t experts = GIN_EP_EXPERTS_INIT;
    fails(gin_ep_multiply(slot.raw(), r.stream.raw(), {0}, &experts), GIN_ERROR_HANDLE, "the grouped product is null");
    fails(gin_ep_receive_multiply(slot.raw(), r.stream.raw(), {slot.raw().id}, &nowhere), GIN_ERROR_HANDLE,
          "is a slot, not a overlapped product");
    fails(gin_stream_write(r.stream.raw(), &nowhere, r.rows.data()), GIN_ERROR_ARGUMENT, "cannot be used as memory");
    fails(gin_stream_write(r.stream.raw(), &nowhere, nullptr), GIN_ERROR_ARGUMENT, "`from` is null");

    // The stream of the other rank, while both ranks wait here.
    r.job.barrier();
    if (r.rank == 1) stream_of_other_rank = r.stream.raw();
    r.job.barrier();
    if (r.rank == 0) {
        none = r.tokens();
        fails(gin_ep_exchange(slot.raw(), stream_of_other_rank, &none), GIN_ERROR_ARGUMENT,
              "`stream` is of another rank, on virtual GPU 1; the group is of a rank on virtual GPU 0");
    }
    r.job.barrier();

    // Rows and sums of a combine. One that is refused ends the dispatch, unless a handle, a pointer or `size` is wrong.
    auto received = [&] { slot.exchange(r.stream, r.tokens()); };
    auto not_combined = [&](gin_ep_combine_t combine, const char* part) {
        received();
        fails(gin_ep_combine(slot.raw(), r.stream.raw(), &combine), GIN_ERROR_ARGUMENT, part);
        fails(gin_ep_release(slot.raw()), GIN_ERROR_STATE, "slot 0 has no dispatch for this call");
    };
    gin_ep_combine_t combine = r.sums();
    combine.output.bytes = 16, not_combined(combine, "the memory of the output has 16 bytes, 2304 are needed");
    combine = r.sums(), combine.weights = r.rows.memory();
    not_combined(combine, "configure `combine_at_source`, or leave `weights` out");
    combine = r.sums(), combine.returned = 1, combine.rows = r.rows.memory();
    received();
    fails(gin_ep_combine(slot.raw(), r.stream.raw(), &combine), GIN_ERROR_ARGUMENT, "combine.returned is 1");
    fails(gin_ep_release(slot.raw()), GIN_ERROR_STATE, "slot 0 has no dispatch for this call");
    combine = r.sums(), combine.rows = r.rows.memory(), not_combined(combine, "the memory of returned rows has 2304");
    combine = r.sums(), combine.bias = gin::ep::memory(r.rows.data(), 8), not_combined(combine, "the memory of the bias");
    gin::ep::Permuted indices(group, GIN_EP_EXPERT_MAJOR_INDICES, 100), padded(group, GIN_EP_EXPERT_MAJOR_PADDED);
    combine = r.sums(), combine.permuted = padded.raw();
    not_combined(combine, "use an expert-major layout with `combine_at_source`, and a flat one without");
    received();
    fails(gin_ep_reduce(slot.raw(), r.stream.raw(), indices.raw(), nullptr), GIN_ERROR_ARGUMENT,
          "use GIN_EP_EXPERT_MAJOR_PACKED or GIN_EP_EXPERT_MAJOR_PADDED, or other memory");
    combine = r.sums(), combine.size = 0;
    fails(gin_ep_combine(slot.raw(), r.stream.raw(), &combine), GIN_ERROR_ARGUMENT, "begin with GIN_EP_COMBINE_INIT");
    combine = r.sums(), combine.permuted = layout.raw();
    fails(gin_ep_combine(slot.raw(), r.stream.raw(), &combine), GIN_ERROR_ARGUMENT, "is of another group");
    slot.combine(r.stream, r.sums());
    r.stream.synchronize();

    fails(gin_ep_slot_create(group.raw(), 1, nullptr), GIN_ERROR_ARGUMENT, "`slot` is null");
    gin_ep_slot_t again;
    fails(gin_ep_slot_create(group.raw(), 1, &again), GIN_ERROR_ARGUMENT, "slot is 1: the group has 1, from 0 on");
    fails(gin_ep_slot_create(group.raw(), 0, &again), GIN_ERROR_STATE, "slot 0 is open: close it by gin_ep_slot_close");
    uint64_t masked;
    fails(gin_ep_group_masked(group.raw(), 7, &masked), GIN_ERROR_ARGUMENT, "slot is 7: the group has 1");
    fails(gin_ep_group_readmit(group.raw()), GIN_ERROR_STATE, "slot 0 is open");
    fails(gin_ep_group_destroy(group.raw()), GIN_ERROR_STATE, "slot 0 is open");
    gin_ep_slot_t raw = slot.raw();
    slot.close(), of_other.close();
    fails(gin_ep_slot_close(raw), GIN_ERROR_HANDLE, "is closed");
    fails(gin_ep_receive(raw, r.stream.raw()), GIN_ERROR_HANDLE, "is closed");
    gin_ep_group_t ended = group.raw();
    group.destroy(), other.destroy();
    uint32_t found;
    gin_ep_report_t report;
    fails(gin_ep_group_status(ended, &found, &report), GIN_ERROR_HANDLE, "is closed");
    fails(gin_ep_slot_create(ended, 0, &again), GIN_ERROR_HANDLE, "is closed");
    fails(gin_ep_permuted_create(ended, GIN_EP_FLAT, 1, 0, &permuted), GIN_ERROR_HANDLE, "is closed");
}

static void sizes(Rank& r) {
    gin_ep_group_t group;
    auto refused = [&](gin_ep_config_t config, const char* part) {
        uint64_t bytes;
        fails(gin_ep_footprint(&config, 2, 0, &bytes), GIN_ERROR_ARGUMENT, part);
        fails(gin_ep_group_create(r.comm.raw(), &config, &group), GIN_ERROR_ARGUMENT, part);
    };
    gin_ep_config_t config = r.config();
    config.size = 4, refused(config, "config.size is 4, not 64: begin with GIN_EP_CONFIG_INIT"), config = r.config();
    config.element = 7, refused(config, "config.element is 7: there are 0 to 6"), config = r.config();
    config.row_bytes = 16, refused(config, "config.row_bytes is 16: leave it 0, or use GIN_EP_OPAQUE");
    config = r.config(), config.scale_bytes = 1, refused(config, "config.scale_bytes is 1: leave it 0");
    config = r.config(), config.hidden = 9, refused(config, "pad rows with zeros to 16 elements");
    config = r.config(), config.experts = 0, refused(config, "the number of experts is 0; the limit is at least 1");
    config = r.config(), config.topk = 33, refused(config, "the number of experts of a token is 33");
    config = r.config(), config.slots = 65, refused(config, "the number of slots is 65");
    config = r.config(), config.threads = 33, refused(config, "the number of threads of a block is 33");
    config = r.config(), config.max_rows = 19, refused(config, "`max_rows` is 19; the limit is 1 to 18");
    config = r.config(), config.combine_f32 = config.combine_at_source = 1, refused(config, "leave out");
    uint64_t bytes;
    fails(gin_ep_footprint(&config, 2, 3, &bytes), GIN_ERROR_ARGUMENT, "leave out");
    config = r.config();
    fails(gin_ep_footprint(&config, 2, 3, &bytes), GIN_ERROR_ARGUMENT, "the number of ranks of an LSA team is 3");
    HOLDS(gin::ep::footprint(config, 2, 1) > gin::ep::footprint(config, 2));
    config.deadline_ms = 1000 + r.rank;
    fails(gin_ep_group_create(r.comm.raw(), &config, &group), GIN_ERROR_ARGUMENT, "`deadline_ms` is");
}

static void steps(Rank& r) {
    gin::ep::Group group(r.comm, r.config());
    gin::ep::Slot slot(group, 0);
    gin_ep_tokens_t tokens = r.tokens();
    gin_ep_combine_t combine = r.sums();
    gin_device_ep_received_t device;
    auto nothing_received = [&](const char* part) {
        fails(gin_ep_combine(slot.raw(), r.stream.raw(), &combine), GIN_ERROR_STATE, part);
        fails(gin_ep_release(slot.raw()), GIN_ERROR_STATE, part);
        fails(gin_ep_received_device(slot.raw(), &device), GIN_ERROR_STATE, part);
        std::size_t count = 77;
        uint64_t counts[2] = {88, 99};
        fails(gin_ep_received_counts(slot.raw(), counts, 2, &count), GIN_ERROR_STATE, part);
        HOLDS(count == 77 && counts[0] == 88 && counts[1] == 99);
    };
    const char* no_dispatch = "slot 0 has no dispatch for this call: begin one by gin_ep_dispatch or gin_ep_exchange";
    nothing_received(no_dispatch);
    fails(gin_ep_receive(slot.raw(), r.stream.raw()), GIN_ERROR_STATE, no_dispatch);
    slot.dispatch(r.stream, tokens);
    nothing_received("the last dispatch of slot 0 was not received: call gin_ep_receive");
    fails(gin_ep_exchange(slot.raw(), r.stream.raw(), &tokens), GIN_ERROR_STATE, "call gin_ep_receive");
    slot.receive(r.stream);
    fails(gin_ep_receive(slot.raw(), r.stream.raw()), GIN_ERROR_STATE, no_dispatch);
    fails(gin_ep_dispatch(slot.raw(), r.stream.raw(), &tokens), GIN_ERROR_STATE,
          "slot 0 has received rows: call gin_ep_combine or gin_ep_release first");
    slot.combine(r.stream, combine);
    nothing_received(no_dispatch);
    slot.exchange(r.stream, tokens);
    slot.end();
    nothing_received(no_dispatch);

    // A slot that is closed with a dispatch that was not received.
    slot.dispatch(r.stream, tokens);
    slot.close();
    slot = gin::ep::Slot(group, 0);
    fails(gin_ep_exchange(slot.raw(), r.stream.raw(), &tokens), GIN_ERROR_STATE, "all ranks call gin_ep_group_readmit");
    slot.close();
    group.readmit();
    slot = gin::ep::Slot(group, 0);
    slot.exchange(r.stream, tokens);
    slot.combine(r.stream, combine);
    r.stream.synchronize();
    HOLDS(!group.status());
    slot.close(), group.destroy();
}

static void reports(Rank& r) {
    gin::ep::Group group(r.comm, r.config());
    gin::ep::Slot slot(group, 0);
    if (r.rank == 0) r.ids.data()[4 * TOPK + 1] = EXPERTS + 2;
    gin_ep_tokens_t tokens = r.tokens();
    slot.exchange(r.stream, tokens);
    slot.combine(r.stream, r.sums());
    r.stream.synchronize();
    if (r.rank == 0) {
        fails(gin_ep_exchange(slot.raw(), r.stream.raw(), &tokens), GIN_ERROR_STATE,
              "an earlier call has left a report: slot 0: token 4 has the expert id 7, there are 5 experts; the token was "
              "dropped; read it by gin_ep_group_status");
        std::optional<gin_ep_report_t> report = group.status();
        HOLDS(report && report->code == GIN_EP_UNKNOWN_EXPERT && report->expert == EXPERTS + 2 && report->seen == 4);
        HOLDS(report->limit == EXPERTS && report->rank == GIN_NONE && report->slot == 0);
        HOLDS(std::strstr(report->text, "token 4 has the expert id 7") != nullptr);
        r.ids.data()[4 * TOPK + 1] = 0;
    }
    HOLDS(!group.status());
    slot.exchange(r.stream, tokens);
    slot.combine(r.stream, r.sums());
    r.stream.synchronize();
    HOLDS(!group.status());

    // More rows than a layout has room for.
    gin::ep::Permuted small(group, GIN_EP_FLAT, 2);
    slot.exchange(r.stream, tokens);
    slot.permute(r.stream, small);
    slot.end();
    r.stream.synchronize();
    HOLDS(r.rank != 0 || small.counts() == std::vector<uint32_t>{2 * ROOM});
    std::optional<gin_ep_report_t> report = group.status();
    // All ids are 0, an expert of rank 0.
    HOLDS(report.has_value() == (r.rank == 0));
    HOLDS(!report || (report->code == GIN_EP_TOO_MANY_ROWS && report->seen == 2 * ROOM && report->limit == 2));

    // The end reports what nobody has read, and frees the memory.
    if (r.rank == 1) r.ids.data()[0] = EXPERTS;
    slot.exchange(r.stream, tokens);
    slot.combine(r.stream, r.sums());
    slot.close();
    gin_ep_group_t raw = group.release();
    if (r.rank == 0) HOLDS(gin_ep_group_destroy(raw) == GIN_OK);
    else fails(gin_ep_group_destroy(raw), GIN_ERROR_STATE, "token 0 has the expert id 5");
    fails(gin_ep_group_destroy(raw), GIN_ERROR_HANDLE, "is closed");
}

static void silent(Rank& r) {
    gin_ep_config_t config = r.config();
    config.deadline_ms = 100;
    gin::ep::Group group(r.comm, config);
    {
        gin::ep::Slot slot(group, 0);
        if (r.rank == 0) {
            slot.exchange(r.stream, r.tokens());
            slot.combine(r.stream, r.sums());
            r.stream.synchronize();
            std::optional<gin_ep_report_t> report = group.status();
            HOLDS(report && report->code == GIN_EP_SILENT && report->rank == 1);
            HOLDS(group.masked(0) == 2);
        }
        slot.close();
    }
    r.job.barrier();
    group.readmit();
    HOLDS(group.masked(0) == 0);
    group.destroy();
    r.comm.check_fault();
    // A rank that leaves ends the communicator.
    r.job.barrier();
}

static void busy(Rank& r) {
    gin::ep::Group group(r.comm, r.config());
    r.job.barrier();
    static std::atomic<bool> seen;
    seen = false;
    r.job.barrier();
    if (r.rank == 0) {
        gin_status_t admitted = GIN_ERROR_BUSY;
        std::thread other([&] {
            // The calls of this thread may be under way.
            while (admitted == GIN_ERROR_BUSY) admitted = gin_ep_group_readmit(group.raw());
        });
        uint32_t found;
        gin_ep_report_t report;
        while (gin_ep_group_status(group.raw(), &found, &report) == GIN_OK) std::this_thread::yield();
        fails(gin_ep_group_status(group.raw(), &found, &report), GIN_ERROR_BUSY, "another thread calls the group");
        fails(gin_ep_group_destroy(group.raw()), GIN_ERROR_BUSY, "another thread calls the group");
        fails(gin_comm_destroy(r.comm.raw()), GIN_ERROR_BUSY, "another thread launches kernels of gin");
        seen = true;
        other.join();
        HOLDS(admitted == GIN_OK);
    } else {
        while (!seen) std::this_thread::yield();
        group.readmit();
    }
    // While a thread destroys the communicator, no call launches.
    gin::ep::Slot slot(group, 0);
    r.job.barrier();
    seen = false;
    r.job.barrier();
    if (r.rank == 0) {
        gin_status_t ended = GIN_ERROR_BUSY;
        std::thread other([&] {
            // The calls of this thread may be under way.
            while (ended == GIN_ERROR_BUSY) ended = gin_comm_destroy(r.comm.raw());
        });
        while (gin_ep_receive(slot.raw(), r.stream.raw()) == GIN_ERROR_STATE) std::this_thread::yield();
        fails(gin_ep_receive(slot.raw(), r.stream.raw()), GIN_ERROR_BUSY, "another thread destroys the communicator");
        seen = true;
        other.join();
        HOLDS(ended == GIN_OK);
    } else {
        while (!seen) std::this_thread::yield();
        r.comm.destroy();
    }
    gin_ep_tokens_t tokens = r.tokens();
    fails(gin_ep_exchange(slot.raw(), r.stream.raw(), &tokens), GIN_ERROR_STATE, "destroyed");
    slot.close();
    group.destroy();
}

static void aborted(Rank& r) {
    gin_ep_config_t config = r.config();
    config.deadline_ms = GIN_FOREVER;
    gin::ep::Group group(r.comm, config);
    gin::ep::Slot slot(group, 0);
    if (r.rank == 0) {
        slot.exchange(r.stream, r.tokens());
        slot.combine(r.stream, r.sums());
        r.stream.synchronize();
        std::optional<gin_ep_report_t> report = group.status();
        HOLDS(report && report->code == GIN_EP_STOPPED);
        fails(gin_comm_check(r.comm.raw()), GIN_ERROR_ENDED, "abort");
    } else {
        // Without a deadline only the abort ends the wait.
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
        r.comm.abort();
    }
    // Neither waits for the other rank.
    slot.close();
    group.destroy();
}

static void network(const gin::Job& job) {
    Rank r{job};
    gin::ep::Group group(r.comm, r.config());
    gin::ep::Slot slot(group, 0);
    gin::ep::Permuted flat(group, GIN_EP_FLAT, 100);
    gin_ep_tokens_t tokens = r.tokens();
    fails(gin_ep_exchange_into(slot.raw(), r.stream.raw(), &tokens, flat.raw()), GIN_ERROR_ARGUMENT,
          "call gin_ep_exchange and gin_ep_permute");
    gin_ep_config_t config = r.config();
    config.max_rows = 4;
    gin_ep_group_t other;
    fails(gin_ep_group_create(r.comm.raw(), &config, &other), GIN_ERROR_ARGUMENT, "leave `max_rows` out");
    slot.close(), group.destroy(), r.comm.destroy();
}

int main() try {
    gin_config_t config = gin::default_config();
    config.device = GIN_DEVICE_VIRTUAL;
    int failed = 0;
    for (void (*body)(Rank&) : {arguments, sizes, steps, reports, silent, busy, aborted}) {
        failed |= on_ranks(2, config, [&](const gin::Job& job) {
            Rank rank{job};
            body(rank);
        });
    }
    config.lsa_size = 1;
    failed |= on_ranks(2, config, network);
    std::printf("%s\n", failed ? "failed" : "passed");
    return failed;
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
