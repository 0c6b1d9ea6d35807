// Shared by the entry points (native.cpp) and the kernels, which are built once for each instruction set.

#pragma once

#include <cstdint>

namespace tokenmill {

constexpr int PAGE = 16;   // tokens in a page of the layout
constexpr int TILE = 128;  // keys whose softmax is summed together; tiles begin at position 0 and are merged in order
constexpr int ITEM_ROWS = 96;  // maximum of rows times query heads of an item
constexpr int MAX_DIM = 256;
constexpr int STATE_HEADER = 16;  // floats; keeps the sums aligned

/// The KV cache. A block holds [layer][kv head][page][K, V]; a page of 16 tokens is
///   bf16: K [dim / 2][16][2], V [8][dim][2]: pairs that one dot product takes are adjacent
///   fp32: K [dim][16],        V [16][dim]
struct Cache {
    uint8_t* pool;
    int64_t block_bytes;
    int32_t layers, kv_heads, dim, block_size;
    int32_t is_bf16;

    int64_t page_bytes() const { return int64_t(2) * PAGE * dim * (is_bf16 ? 2 : 4); }
    int64_t head_bytes() const { return page_bytes() * (block_size / PAGE); }
    /// Offset of the first page of a head in a block, in bytes.
    int64_t head_at(int layer, int head) const { return (int64_t(layer) * kv_heads + head) * head_bytes(); }
};

/// One batch, as `kernels.attention.base.AttentionBatch` describes it.
struct Batch {
    int64_t id;  // of the batch; plans are cached by it
    int32_t sequences, rows, padded_rows;
    const int32_t* cu;        // [sequences + 1]
    const int32_t* contexts;  // [sequences]
    const int32_t* tables;    // all block tables, concatenated
    const int32_t* table_at;  // [sequences]: offset of each block table
    const int64_t* slots;     // [padded_rows]
};

/// q, out: [rows][heads][dim], rows `q_stride` elements apart.
struct Attend {
    int32_t layer, heads, window;  // window 0: none
    float scale, softcap;          // softcap 0: none
    const void* q;
    int64_t q_stride;
    void* out;
};

/// A unit of work of a thread: the query heads of some KV heads, for some tokens, over a range of positions.
struct Item {
    const int32_t* tokens;  // rows of the batch
    int32_t num_tokens;
    const int32_t* table;  // block table
    int32_t head, heads;   // KV heads [head, head + heads)
    int32_t begin, end;    // positions of keys; a row attends to some of them
    bool resumes;          // continue from the states of the rows
    bool leaves;           // write the states of the rows, not results
    bool apart;            // write a state for each tile
};

/// A state is the partial result of a row and query head after some tiles: the maximum, the total, and from
/// `STATE_HEADER` on the sums.
struct Plan {
    const Item* items;
    const int* levels;  // [num_levels]: end of the items of each level; an item resumes states of earlier levels
    int num_levels;
    const int32_t* positions;  // [rows]
    const int64_t* state_at;   // [rows]: index of the first state of the row; -1: none
    float* states;             // [state][head][STATE_HEADER + dim]
};

/// The next memory that a thread prefetches, ahead of its computing.
struct Ahead {
    const Item *item, *following;  // null: nothing left to prefetch
    int head, page, page_end;      // the next page, and the end of its tile; pages count from position 0
};

/// Rotation and norms before the write. Null weights: no norms; null `cos`: no rotation.
struct Write {
    int32_t layer, heads;
    void* qkv;  // [rows][heads + 2 * kv_heads][dim]; queries are rotated in place
    int64_t stride;
    const float *cos, *sin;  // [rows][dim / 2]
    const void *q_norm, *k_norm;
    float eps;
    int32_t wide_norms;  // the weights of the norms are fp32 and multiply before the rounding
};

constexpr int PANEL = 32;          // outputs in a panel of weights, see gemm.h
constexpr int PANEL_STEP = 128;    // bytes of a panel that one dot product per lane takes
constexpr int FETCH_AHEAD = 2048;  // bytes; the hardware prefetcher stops at the end of a memory page

/// out[row] = x[row] · weight + bias, rounded to bf16.
struct Product {
    const void* x;
    int64_t x_stride;  // bytes
    void* out;
    int64_t out_stride;  // elements
    const void* weight;  // panels
    const float* bias;   // [panels * 32] or null
    int32_t rows, cols, steps;
    int32_t gated;  // panels of gates and ups alternate; the result is `cols` values silu(gate) * up
    // int8: y = (sum - offset) * scale * x_scale. Null for bf16.
    const float* scales;     // [panels * 32]
    const int32_t* offsets;  // [panels * 32]: 128 * sum of the weights, since x is stored as x + 128
    const float* x_scales;   // [rows]
};

/// The functions of the build for one instruction set. A row is a row of the batch or of a matrix.
struct Kernels {
    /// `following` is the next item of the thread, or null; its first pages are prefetched.
    void (*attend)(const Cache&, const Attend&, const Plan&, const Item&, const Item* following, Ahead&);
    void (*reduce)(const Cache&, const Batch&, const Attend&, const Plan&, int row);
    void (*store)(const Cache&, const Batch&, int layer, const void* k, int64_t k_stride, const void* v,
                  int64_t v_stride, int row);
    void (*write)(const Cache&, const Batch&, const Write&, int row);
    void (*add_rms_norm)(const void* x, void* residual, const void* weight, void* out, int cols, float eps,
                         bool is_bf16, bool wide_weight);
    void (*silu_mul)(const void* gate_up, void* out, int cols, bool is_bf16);
    void (*gelu_mul)(const void* gate_up, void* out, int cols, bool is_bf16);
    void (*softcap)(void* x, int cols, float cap, bool is_bf16);
    void (*argmax)(const void* x, int cols, bool is_bf16, int64_t* place, bool* finite);
    void (*quantize)(const void* x, uint8_t* out, float* step, int cols, bool is_bf16);
    /// Null without bf16 dot products. Computes one or two panels from `column` on.
    void (*matmul)(const Product&, int row, int rows, int column, int width, int64_t ahead);
};

extern const Kernels avx2_kernels, avx512_kernels, avx512_bf16_kernels;

}  // namespace tokenmill
