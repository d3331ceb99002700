// ep_params.cuh   What every expert-parallel kernel is handed by value: the peer table, sizes, offsets, local buffers.
//
// Mirrored by expert_parallel/workspace.py (ctypes); both sides check the sizes. Offsets count bytes from the start of a
// rank's symmetric region and are the same on every rank.
#pragma once
#include "ptx.cuh"

constexpr int kMaxRanks = 72;

// Where the peers' regions lie: region of p = base + offset[p] (modulo 2^64).
struct PeerTable {
    uint64_t base;
    uint64_t offset[kMaxRanks];
    int32_t rank;
    int32_t num_ranks;
};
static_assert(sizeof(PeerTable) == 592, "the by-value descriptor of 72 ranks");

// Persistent device state of one layer object; a CTA of role3 moves it on.
struct EpState {
    uint64_t generation;     // calls completed
    uint64_t block_base;     // ring sequence number of the next call's first block
    uint32_t poison;         // set once by the first failed wait; everything leaves
    uint32_t combine_begun;  // 2^16 a call whose role3 has read this state, monotonic
    uint32_t combine_done;   // 2^16 a call whose role3 has read its partial results, monotonic
    uint32_t claimed;        // by which call's role1 last, modulo 2^32: a second one over it is refused
    uint32_t tickets;        // that role2's CTAs have taken in all calls, modulo 2^32: see ep_experts.cu
    uint32_t reserved;
};
static_assert(sizeof(EpState) == 40, "workspace.py allocates the same");

// What a failed wait tells the host: pinned host memory, written once.
struct EpError {
    uint32_t code;  // 0: none; see sync.cuh
    int32_t rank, peer;
    uint32_t flag;  // which flag, see sync.cuh
    uint64_t generation, expected, seen;
};
static_assert(sizeof(EpError) == 40, "workspace.py allocates the same");

struct EpParams {
    PeerTable peers;
    // Offsets into the symmetric region.
    uint64_t arrived_offset;   // u64 [kMaxRanks]
    uint64_t done_offset;      // u64 [kMaxRanks]
    uint64_t meta_offset;      // [2][num_ranks] of meta_bytes: packets of 16 bytes, see ep_common.cuh
    uint64_t rows_offset;      // [max_tokens] of row_bytes, a multiple of 128
    uint64_t partials_offset;  // [max_tokens][topk + num_shared][hidden]
    uint64_t meta_bytes;
    uint64_t row_bytes;        // kRowBytes of ep_common.cuh
    // Local buffers.
    EpState* gmem_state;
    EpError* pinned_error;
    uint64_t* gmem_plan;         // packets of 16 bytes, [1 + max_blocks]: see ep_common.cuh
    uint8_t* gmem_ring_info;     // [num_slots] of {int32 expert, count, pad, pad; u32 pair_id[BM]; f32 weight[BM]}
    uint8_t* gmem_ring_x;        // [num_slots][ring_x_slot_bytes]
    float* gmem_ring_x_scale;    // [num_slots][x scales a token][BM]
    uint8_t* gmem_ring_act;      // [num_slots][ring_act_slot_bytes]
    float* gmem_ring_act_scale;  // [num_slots][I_p / 64][BM]
    uint32_t* gmem_l1_full;      // [num_slots]
    uint32_t* gmem_l1_empty;     // [num_slots]
    uint64_t* gmem_l2_full;      // [num_slots]
    uint32_t* gmem_l2_empty;     // [num_slots]
    // Sizes that are not compiled in.
    uint64_t timeout_ns;
    int32_t max_tokens;
    int32_t num_slots;
    int32_t max_blocks;
    int32_t comm_ctas;     // role1's grid, the same on every rank
    int32_t compute_ctas;  // role2's grid, the same on every rank
    int32_t lag;           // blocks between a block's first and second GEMM in the task list
};
#ifdef WARPRING_EP_PARAMS_BYTES
static_assert(sizeof(EpParams) == WARPRING_EP_PARAMS_BYTES, "workspace.py computes the same size");
#endif
