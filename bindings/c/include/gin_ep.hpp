// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Expert parallelism for C++17: classes that own the handles of gin.h, as gin.hpp has them. docs/c.md is the page for
// users.
//
// Destructors are not collective: a group that is not destroyed leaves its memory to the communicator.

#pragma once

#include "gin.hpp"

#include <optional>

#pragma push_macro("check")
#undef check

namespace gin {
namespace ep {

/// Returns the sizes of a group with the other values at their defaults.
inline gin_ep_config_t config(uint32_t experts, uint32_t hidden, uint32_t topk) {
    gin_ep_config_t config = GIN_EP_CONFIG_INIT;
    config.experts = experts, config.hidden = hidden, config.topk = topk;
    return config;
}
/// Returns no tokens: the defaults.
inline gin_ep_tokens_t tokens() { return GIN_EP_TOKENS_INIT; }
/// Returns a combine of the received rows into this memory.
inline gin_ep_combine_t combine(const gin_memory_t& output) {
    gin_ep_combine_t combine = GIN_EP_COMBINE_INIT;
    combine.output = output;
    return combine;
}
/// Returns memory of `count` elements.
template <class T>
gin_memory_t memory(const T* data, std::size_t count) {
    return {const_cast<std::remove_const_t<T>*>(data), count * sizeof(T)};
}
/// Returns the bytes that a group takes on each rank. `lsa_size` is 0 if loads and stores reach all ranks.
inline uint64_t footprint(const gin_ep_config_t& config, uint32_t ranks, uint32_t lsa_size = 0) {
    uint64_t bytes;
    check(gin_ep_footprint(&config, ranks, lsa_size, &bytes));
    return bytes;
}

/// The ranks of a communicator, with the memory for rows of tokens.
class Group : public Handle<gin_ep_group_t, gin_ep_group_release> {
public:
    using Handle::Handle;

    /// Allocates the memory. Collective.
    Group(const Communicator& comm, const gin_ep_config_t& config) {
        check(gin_ep_group_create(comm.raw(), &config, &raw_));
    }
    /// Returns the first error of the kernels since the last call, if there is one.
    std::optional<gin_ep_report_t> status() const {
        uint32_t found;
        gin_ep_report_t report;
        check(gin_ep_group_status(raw_, &found, &report));
        return found != 0 ? std::optional<gin_ep_report_t>(report) : std::nullopt;
    }
    /// Returns the ranks that a slot continues without, as bits.
    uint64_t masked(uint32_t slot) const {
        uint64_t ranks;
        check(gin_ep_group_masked(raw_, slot, &ranks));
        return ranks;
    }
    /// Lets all ranks take part again. Collective; no slot is open.
    void readmit() const { check(gin_ep_group_readmit(raw_)); }
    /// Frees the memory. Collective; no slot is open.
    void destroy() {
        gin_status_t status = gin_ep_group_destroy(raw_);
        // With an open slot the handle stays open, and the destructor closes it.
        if (status == GIN_OK) raw_ = {0};
        check(status);
    }
};

/// Returns no memory of the program for a layout: the defaults.
inline gin_ep_permuted_into_t permuted_into() { return GIN_EP_PERMUTED_INTO_INIT; }
/// Returns no memory for metadata: the defaults.
inline gin_ep_metadata_t metadata() { return GIN_EP_METADATA_INIT; }

/// Memory for received rows in a layout.
class Permuted : public Handle<gin_ep_permuted_t, gin_ep_permuted_close> {
public:
    using Handle::Handle;

    /// Allocates memory for at most `rows` rows; a padded or fixed layout knows their number.
    Permuted(const Group& group, gin_ep_layout_t layout, uint32_t rows = 0, uint32_t align = 0) {
        check(gin_ep_permuted_create(group.raw(), layout, rows, align, &raw_));
    }
    /// Allocates memory for counts and places alone.
    static Permuted without_rows(const Group& group, gin_ep_layout_t layout, uint32_t rows = 0, uint32_t align = 0) {
        gin_ep_permuted_t raw;
        check(gin_ep_permuted_create_without_rows(group.raw(), layout, rows, align, &raw));
        return Permuted(raw);
    }
    /// Returns the same layout in memory of the program.
    Permuted with_memory(const gin_ep_permuted_into_t& into) const {
        gin_ep_permuted_t same;
        check(gin_ep_permuted_with_memory(raw_, &into, &same));
        return Permuted(same);
    }
    /// Returns the same layout for at most `rows` rows.
    Permuted with_capacity(uint32_t rows) const {
        gin_ep_permuted_t same;
        check(gin_ep_permuted_with_capacity(raw_, rows, &same));
        return Permuted(same);
    }
    /// Returns the memory, for kernels.
    gin_ep_permuted_memory_t memory() const {
        gin_ep_permuted_memory_t memory;
        check(gin_ep_permuted_memory(raw_, &memory));
        return memory;
    }
    /// Returns the counts. The stream is done.
    std::vector<uint32_t> counts() const {
        std::size_t count;
        check(gin_ep_permuted_counts(raw_, nullptr, 0, &count));
        std::vector<uint32_t> counts(count);
        check(gin_ep_permuted_counts(raw_, counts.data(), counts.size(), &count));
        return counts;
    }
};

/// The routing of tokens, counted once for several dispatches of the same ids.
class Plan : public Handle<gin_ep_plan_t, gin_ep_plan_close> {
public:
    using Handle::Handle;
};

/// The kernel of products of rows in a layout.
class Grouped : public Handle<gin_ep_grouped_t, gin_ep_grouped_close> {
public:
    using Handle::Handle;

    /// Prepares products with `depth` inner elements, by at most `blocks` blocks; 0 for as many as run.
    Grouped(const Group& group, uint32_t depth, uint32_t blocks = 0) {
        check(gin_ep_grouped_create(group.raw(), depth, blocks, &raw_));
    }
};

/// The kernel of products of rows as they arrive.
class Overlapped : public Handle<gin_ep_overlapped_t, gin_ep_overlapped_close> {
public:
    using Handle::Handle;

    /// Prepares products by at most `blocks` blocks; 0 for as many as run.
    explicit Overlapped(const Group& group, uint32_t blocks = 0) {
        check(gin_ep_overlapped_create(group.raw(), blocks, &raw_));
    }
};

/// Returns the factors of products that return to the ranks of their tokens.
inline gin_ep_experts_t experts(const Permuted& permuted, const gin_memory_t& rows, const gin_memory_t& weights) {
    gin_ep_experts_t experts = GIN_EP_EXPERTS_INIT;
    experts.permuted = permuted.raw(), experts.rows = rows, experts.weights = weights;
    return experts;
}

/// Room for one dispatch at a time. Close it before the group is destroyed.
class Slot : public Handle<gin_ep_slot_t, gin_ep_slot_close> {
public:
    using Handle::Handle;

    /// Opens a slot of the group.
    Slot(const Group& group, uint32_t number) { check(gin_ep_slot_create(group.raw(), number, &raw_)); }

    /// Sends the rows of the tokens.
    void dispatch(const Stream& stream, const gin_ep_tokens_t& tokens) const {
        check(gin_ep_dispatch(raw_, stream.raw(), &tokens));
    }
    /// Waits for the rows of all ranks.
    void receive(const Stream& stream) const { check(gin_ep_receive(raw_, stream.raw())); }
    /// Sends the rows and waits for the rows of all ranks.
    void exchange(const Stream& stream, const gin_ep_tokens_t& tokens) const {
        check(gin_ep_exchange(raw_, stream.raw(), &tokens));
    }
    /// Does the same, and puts the received rows into a layout.
    void exchange_into(const Stream& stream, const gin_ep_tokens_t& tokens, const Permuted& to) const {
        check(gin_ep_exchange_into(raw_, stream.raw(), &tokens, to.raw()));
    }
    /// Counts the tokens for each rank once, for dispatches of the same ids.
    Plan plan(const Stream& stream, const gin_ep_tokens_t& tokens) const {
        gin_ep_plan_t raw;
        check(gin_ep_plan_create(raw_, stream.raw(), &tokens, &raw));
        return Plan(raw);
    }
    /// Copies the received rows into a layout.
    void permute(const Stream& stream, const Permuted& to) const { check(gin_ep_permute(raw_, stream.raw(), to.raw())); }
    /// Stores the metadata of rows of a layout in memory of the program.
    void store_metadata(const Stream& stream, const Permuted& of, const gin_ep_metadata_t& into) const {
        check(gin_ep_store_metadata(raw_, stream.raw(), of.raw(), &into));
    }
    /// Adds up the rows of the experts, those of the layout or in other memory, in place of the received rows.
    void reduce(const Stream& stream, const Permuted& of, const gin_memory_t& rows = GIN_MEMORY_NULL) const {
        check(gin_ep_reduce(raw_, stream.raw(), of.raw(), &rows));
    }
    /// Multiplies the rows of each expert by its weights.
    void multiply(const Stream& stream, const Grouped& by, const gin_ep_experts_t& experts) const {
        check(gin_ep_multiply(raw_, stream.raw(), by.raw(), &experts));
    }
    /// Waits for the rows of all ranks, and multiplies them as they arrive.
    void receive_multiply(const Stream& stream, const Overlapped& by, const gin_memory_t& weights) const {
        check(gin_ep_receive_multiply(raw_, stream.raw(), by.raw(), &weights));
    }
    /// Returns the rows to their sources, and stores the sums.
    void combine(const Stream& stream, const gin_ep_combine_t& combine) const {
        check(gin_ep_combine(raw_, stream.raw(), &combine));
    }
    /// Ends the dispatch without a combine.
    void end() const { check(gin_ep_release(raw_)); }
    /// Returns the argument of kernels for received rows: a `gin::ep::ReceivedRows` of gin_ep.cuh takes it.
    gin_device_ep_received_t received() const {
        gin_device_ep_received_t device;
        check(gin_ep_received_device(raw_, &device));
        return device;
    }
    /// Returns the number of received rows from each source. The stream is done.
    std::vector<uint64_t> counts() const {
        std::size_t count;
        check(gin_ep_received_counts(raw_, nullptr, 0, &count));
        std::vector<uint64_t> counts(count);
        check(gin_ep_received_counts(raw_, counts.data(), counts.size(), &count));
        return counts;
    }
    /// Closes the slot. Waits for its kernels.
    void close() {
        check(gin_ep_slot_close(raw_));
        raw_ = {0};
    }
};

}  // namespace ep
}  // namespace gin

#pragma pop_macro("check")
