/* The model and the batch, as `native.py` passes them.

   Every structure of this file, and `Matrix`, is declared again in native.py with the same fields in the same order:
   change both. */

#pragma once

#include "matrices.h"

enum { QKV, OUT, GATE_UP, DOWN, NUM_ADAPTED, MAX_RANK = 128 };

typedef struct { /* what an adapter adds to some outputs of a matrix: y[first ...] += b (a x) */
    const float *a, *b; /* [rank, columns], [rows, rank] */
    int64_t first, rows, rank;
} LowRank;

typedef struct { /* what an adapter adds to one matrix */
    const LowRank *parts;
    int64_t num_parts;
} Adapter;

typedef struct {
    Matrix qkv, out, gate_up, down;
    const float *attention_norm, *attention_post_norm, *mlp_norm, *mlp_post_norm; /* or NULL */
    const float *qk_norm, *rope;                                                  /* or NULL */
    int64_t window;                                                               /* 0: all positions */
} Layer;

typedef struct {
    Matrix embedding;
    const Layer *layers;
    const float *norm;
    int64_t num_layers, hidden, num_heads, num_kv_heads, head_dim, ffn;
    float eps, scale, score_cap, embedding_scale; /* score_cap 0: none */
    int32_t activation;                           /* 0: silu, 1: the tanh form of gelu */
    int32_t full_qk_norm;                         /* the norm of queries and keys is over all heads together */
} Model;

typedef struct { /* see engine/cpu/inputs.py */
    int64_t num_tokens, num_rows, page_size, num_pages; /* num_pages: the columns of `pages` */
    int64_t num_decode_rows; /* they come first; the tokens of other rows are computed with tiles */
    const int64_t *tokens, *positions, *kv_indices, *starts, *lengths, *offsets;
    const int32_t *pages;
    uint16_t *const *keys, *const *values; /* by layer, in bfloat16: [positions of the KV cache, KV heads, head_dim] */
    float *x;         /* [tokens, hidden]: the result */
    uint8_t *scratch; /* of scratch_bytes(), aligned to a cache line */
    int64_t num_threads;
    const Adapter *const *adapters; /* by token: [layers, NUM_ADAPTED] or NULL; NULL: no token has one */
} Batch;

INLINE int64_t qkv_size(const Model *m) { return (m->num_heads + 2 * m->num_kv_heads) * m->head_dim; }
