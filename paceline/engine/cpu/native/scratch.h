/* The memory of a forward pass beside weights and KV cache, and the tasks of attention.

   Python allocates scratch_bytes() and passes them with the batch; lay_out() divides them. A field of `Scratch` that is
   an array is added there, too. */

#pragma once

#include "gemm_bfloat16.h"
#include "model.h"

#define CHUNK 64  /* positions whose attention is computed on its own, from a multiple of it on, and then merged */
#define QUERIES 8 /* tokens of one request whose attention is computed together */

typedef struct { /* attention of up to QUERIES tokens of a row, to all positions or to one chunk of them */
    int64_t row, first, chunk; /* first: index in the tokens of the row; chunk -1: all positions */
    int64_t partial;           /* with a chunk: its place in the partial results */
} Task;

typedef struct { /* attention of some tokens of a row, for the query heads of one KV head, with tiles */
    int64_t row, first, head;
} TileTask;

typedef struct { /* the inputs of a matrix */
    Rounded rounded;    /* those of tokens of decode rows */
    uint16_t *bfloat16; /* those of other tokens */
} Operand;

typedef struct {
    Operand input, gated; /* gated: those of `down`, written while other threads read those of `gate_up` */
    float *qkv, *attended, *gate_up, *block; /* block: the output of a block, where a norm follows it */
    Task *tasks;
    TileTask *tile_tasks;
    float *partials;
    int64_t num_decodes; /* tokens of decode rows; they come first */
    int64_t num_tasks, num_tile_tasks, num_partials;
} Scratch;

/* The most queries of a task, and the floats of their partial result: outputs, then maxima, then totals. */
INLINE int64_t max_queries(const Model *m) { return QUERIES * m->num_heads; }
INLINE int64_t width_for(int64_t size) { return (size + 2 * LANES - 1) / (2 * LANES) * (2 * LANES); }
INLINE int64_t width_of(const Model *m) { return width_for(m->head_dim); }
INLINE int64_t partial_size(const Model *m) { return (max_queries(m) * (width_of(m) + 2) + 15) / 16 * 16; }

/* The most tokens of a TileTask: 8 tiles of 16 queries, so that threads have about the same work. */
INLINE int64_t tile_tokens(const Model *m) {
    int64_t heads = m->num_heads / m->num_kv_heads;
    return heads < 128 ? 128 / heads : 1;
}

/* Lists the tasks of attention, longest first. Where there are few, those of one block of tokens are divided by chunks:
   this changes who computes what and no result. */
static void list_tasks(const Model *m, const Batch *b, Scratch *s) {
    int64_t blocks = 0, num = 0, partials = 0;
    for (int64_t row = 0; row < b->num_decode_rows; row++) blocks += (b->lengths[row] + QUERIES - 1) / QUERIES;
    int divides = blocks < 4 * b->num_threads;
    for (int64_t row = b->num_decode_rows - 1; row >= 0; row--)
        for (int64_t first = (b->lengths[row] - 1) / QUERIES * QUERIES; first >= 0; first -= QUERIES) {
            int64_t end = b->starts[row] + first + min2(b->lengths[row] - first, QUERIES);
            int64_t chunks = divides ? (end + CHUNK - 1) / CHUNK : 1;
            for (int64_t chunk = 0; chunk < chunks; chunk++, num++)
                if (s->tasks) s->tasks[num] = (Task){row, first, divides ? chunk : -1, divides ? partials++ : -1};
                else partials += divides;
        }
    s->num_tasks = num, s->num_partials = partials, s->num_tile_tasks = 0;
    int64_t tokens = tile_tokens(m);
    for (int64_t row = b->num_rows - 1; row >= b->num_decode_rows; row--)
        for (int64_t first = (b->lengths[row] - 1) / tokens * tokens; first >= 0; first -= tokens)
            for (int64_t head = 0; head < m->num_kv_heads; head++, s->num_tile_tasks++)
                if (s->tile_tasks) s->tile_tasks[s->num_tile_tasks] = (TileTask){row, first, head};
}

#define TAKE(field, type, count) field = (type *)at, at += padded((count) * (int64_t)sizeof(type))

/* Places the inputs of a matrix at `at`: those of tokens of decode rows, and of other tokens. Returns the end. */
static uint8_t *lay_out_operand(Operand *to, int64_t decodes, int64_t others, int64_t columns, uint8_t *at) {
    int64_t groups = groups_of(columns);
    TAKE(to->rounded.high, int8_t, decodes * groups * GROUP);
    TAKE(to->rounded.low, int8_t, decodes * groups * GROUP);
    TAKE(to->rounded.scales, float, decodes * groups);
    TAKE(to->rounded.sums, float, decodes * groups);
    TAKE(to->bfloat16, uint16_t, (others + 15) / 16 * 16 * groups * GROUP); /* all rows of a tile are read */
    return at;
}

/* Places all arrays at `at`. Returns how many bytes they take. */
static int64_t lay_out(const Model *m, const Batch *b, uint8_t *at, Scratch *s) {
    uint8_t *first = at;
    int64_t tokens = b->num_tokens;
    int64_t decodes = b->num_decode_rows < b->num_rows ? b->offsets[b->num_decode_rows] : tokens;
    s->num_decodes = decodes, s->tasks = NULL, s->tile_tasks = NULL;
    list_tasks(m, b, s);
    at = lay_out_operand(&s->input, decodes, tokens - decodes, max2(m->hidden, m->num_heads * m->head_dim), at);
    at = lay_out_operand(&s->gated, decodes, tokens - decodes, m->ffn, at);
    TAKE(s->qkv, float, tokens * qkv_size(m));
    TAKE(s->attended, float, tokens * m->num_heads * m->head_dim);
    TAKE(s->gate_up, float, tokens * 2 * m->ffn);
    TAKE(s->block, float, tokens * m->hidden);
    TAKE(s->tasks, Task, s->num_tasks);
    TAKE(s->tile_tasks, TileTask, s->num_tile_tasks);
    TAKE(s->partials, float, s->num_partials * partial_size(m));
    return at - first;
}
#undef TAKE

int64_t scratch_bytes(const Model *model, const Batch *batch) {
    Scratch unused;
    return lay_out(model, batch, (uint8_t *)64, &unused);
}

/* Stores some groups of one token's input of a matrix with `columns` columns. x: the token's row. */
static void set_input(const Scratch *s, const Operand *input, const float *x, int64_t columns, int64_t token,
                      Part groups) {
    Rounded to = input->rounded;
    to.columns = groups_of(columns) * GROUP;
    if (token < s->num_decodes) round_row(x, columns, &to, token, groups);
#if TILES
    else round_row_bfloat16(x, columns, token - s->num_decodes, groups, input->bfloat16);
#endif
}
