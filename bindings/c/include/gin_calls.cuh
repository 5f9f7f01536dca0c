// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The functions of bindings/c/device that gin_device.cuh calls, which includes this.

#pragma once

extern "C" {
#if defined(__CUDACC_RDC__)
/// The number of the layouts that a library of device functions was compiled with. It has as many words as the number, so
/// nvlink refuses a library of another number: "Size doesn't match".
extern __device__ uint32_t gin_abi_version[GIN_ABI_VERSION];
#endif

/// A value and a fault; the value counts only if the fault is 0.
typedef struct gin_value_t {
    uint64_t value;
    uint64_t fault;
} gin_value_t;

/// The shadow of a signal before a wait, the distance to its value after it, and a fault.
typedef struct gin_followed_t {
    uint64_t before;
    uint64_t delta;
    uint64_t fault;
} gin_followed_t;

#define GIN_DECLARE(form) \
    GIN_CALL uint64_t gin_put##form(uint64_t comm, uint32_t context, uint32_t options, uint64_t coop, uint32_t peer, \
                                    uint32_t counter, uint64_t to, uint64_t to_offset, uint64_t from, \
                                    uint64_t from_offset, uint64_t bytes, uint64_t signal_window, uint64_t signal, \
                                    uint64_t amount, uint64_t deadline); \
    GIN_CALL uint64_t gin_put_value##form(uint64_t comm, uint32_t context, uint32_t options, uint64_t coop, \
                                          uint32_t peer, uint32_t bytes, uint64_t to, uint64_t to_offset, \
                                          uint64_t value, uint64_t signal_window, uint64_t signal, uint64_t amount, \
                                          uint64_t deadline); \
    GIN_CALL uint64_t gin_get##form(uint64_t comm, uint32_t context, uint32_t options, uint64_t coop, uint32_t peer, \
                                    uint64_t from, uint64_t from_offset, uint64_t to, uint64_t to_offset, \
                                    uint64_t bytes, uint64_t deadline); \
    GIN_CALL uint64_t gin_signal##form(uint64_t comm, uint32_t context, uint32_t options, uint64_t coop, \
                                       uint32_t peer, uint64_t signal_window, uint64_t signal, uint64_t amount, \
                                       uint64_t deadline); \
    GIN_CALL uint64_t gin_flush##form(uint64_t comm, uint32_t context, uint32_t options, uint64_t coop, \
                                      uint64_t deadline); \
    GIN_CALL gin_value_t gin_flush_async##form(uint64_t comm, uint32_t context, uint32_t options, uint32_t peer); \
    GIN_CALL uint64_t gin_wait##form(uint64_t comm, uint32_t context, uint32_t options, uint64_t coop, uint32_t peer, \
                                     uint64_t position, uint64_t deadline); \
    GIN_CALL uint64_t gin_quiet##form(uint64_t comm, uint32_t context, uint32_t options, uint64_t coop, \
                                      uint32_t peer, uint64_t deadline); \
    GIN_CALL uint64_t gin_quiet_all##form(uint64_t comm, uint32_t context, uint32_t options, uint64_t coop, \
                                          uint64_t deadline); \
    GIN_CALL uint64_t gin_signal_all_contexts##form(uint64_t comm, uint32_t context, uint32_t options, uint64_t coop, \
                                                    uint32_t peer, uint64_t signal_window, uint64_t signal, \
                                                    uint64_t amount, uint64_t deadline); \
    GIN_CALL uint64_t gin_wait_signal##form(uint64_t comm, uint32_t context, uint32_t options, uint64_t coop, \
                                            uint64_t signal_window, uint64_t signal, uint64_t least, uint32_t bits, \
                                            uint64_t deadline); \
    GIN_CALL gin_value_t gin_read_signal##form(uint64_t comm, uint32_t context, uint32_t options, \
                                               uint64_t signal_window, uint64_t signal, uint32_t bits); \
    GIN_CALL uint64_t gin_wait_counter##form(uint64_t comm, uint32_t context, uint32_t options, uint64_t coop, \
                                             uint32_t id, uint64_t least, uint32_t bits, uint64_t deadline); \
    GIN_CALL gin_value_t gin_read_counter##form(uint64_t comm, uint32_t context, uint32_t options, uint32_t id, \
                                                uint32_t bits); \
    GIN_CALL uint64_t gin_wait_signal_meet_shadow##form(uint64_t comm, uint32_t context, uint32_t options, \
                                                        uint64_t coop, uint32_t signal, uint32_t bits, \
                                                        uint64_t deadline); \
    GIN_CALL gin_followed_t gin_wait_signal_follow_shadow##form(uint64_t comm, uint32_t context, uint32_t options, \
                                                                uint64_t coop, uint32_t signal, uint32_t bits, \
                                                                uint64_t least_delta, uint64_t deadline);
GIN_DECLARE()
GIN_DECLARE(_proxy)
GIN_DECLARE(_gdaki)
#undef GIN_DECLARE

GIN_CALL uint64_t gin_reset_signal(uint64_t comm, uint32_t context, uint64_t signal_window, uint64_t signal);
GIN_CALL uint64_t gin_reset_counter(uint64_t comm, uint32_t context, uint32_t id);
GIN_CALL gin_value_t gin_signal_shadow(uint64_t comm, uint32_t context, uint32_t signal);
GIN_CALL uint64_t gin_increase_signal_shadow(uint64_t comm, uint32_t context, uint32_t signal, uint64_t delta);
GIN_CALL uint64_t gin_barrier(uint64_t comm, uint32_t context, uint32_t options, uint64_t coop, uint32_t team,
                              uint32_t index, uint32_t fence, uint64_t deadline);
GIN_CALL uint64_t gin_barrier_arrive(uint64_t comm, uint32_t context, uint32_t options, uint64_t coop, uint32_t team,
                                     uint32_t index, uint32_t fence, uint64_t deadline);
GIN_CALL uint64_t gin_barrier_wait(uint64_t comm, uint32_t context, uint32_t options, uint64_t coop, uint32_t team,
                                   uint32_t index, uint32_t fence, uint64_t deadline);
GIN_CALL gin_value_t gin_peer_pointer(uint64_t comm, uint64_t window, uint64_t offset, uint32_t peer);
GIN_CALL void gin_report(uint64_t comm, uint64_t fault);
GIN_CALL void gin_report_code(uint64_t comm, uint64_t code);
GIN_CALL uint64_t gin_comm_fault_word(uint64_t comm);
GIN_CALL uint64_t gin_coop_sync(uint64_t coop);
GIN_CALL uint32_t gin_device_abi(void);

#if !defined(__CUDACC__)
/// The indices and extents of a thread of the virtual GPU.
typedef struct gin_position_t {
    uint32_t thread_index[3];
    uint32_t block_dim[3];
    uint32_t block_index[3];
    uint32_t grid_dim[3];
} gin_position_t;
gin_position_t gin_virtual_position(void);
/// Waits for all threads of a coop, and returns 1 in all of them if one of them brings a `bit` that is not 0, else 0.
uint32_t gin_virtual_any(uint64_t coop, uint32_t bit);
/// Makes the access of this number in the list of gin_inline.cuh.
uint64_t gin_virtual_access(uint32_t access, uint64_t address, uint64_t value);
#endif
}
