/* Attention of generated tokens, and of prompts where the CPU has no tiles.

   Positions are read by chunks of CHUNK from a multiple of it on, each chunk is computed from nothing (online softmax
   over KEYS at a time), and chunks are merged in order. That is why a result has the same bits however a prompt is
   cut, and whether the chunks of a task are divided among threads or not. */

#pragma once

#include "scratch.h"

#define KEYS 32                       /* positions that are read at a time, from a multiple of it on */
#define TOGETHER (LANES < 16 ? 2 : 4) /* queries that read a key together: as many as the registers hold */

typedef struct { /* the state of attention for the queries of a task, by head and then by token */
    /* queries and out: [queries, width]; top, the largest score so far, and totals: [queries]. Dimensions are in the
       order of load_bfloat16(): of each 2 * LANES, the even ones come first. */
    float *queries, *out, *top, *totals;
    int64_t size, width, window, first, tokens; /* first: position of the first token */
    float cap;
} Attention;

/* In the functions below, `size` is a->size or a constant that equals it. */

/* Computes the scores of LANES keys, from `first` on, for queries i to i + N - 1. */
INLINE void scores_of(const Attention *a, int64_t i, const int N, const int64_t size, const uint16_t *const *keys,
                      int first, float scores[][KEYS]) {
    const int64_t width = width_for(size);
    vf sums[TOGETHER][LANES];
    const float *queries = a->queries + i * width;
    UNROLL_PART(2)
    for (int j = 0; j < LANES; j++) {
        vf acc[TOGETHER];
        UNROLL(4)
        for (int n = 0; n < N; n++) acc[n] = (vf){0};
        UNROLL_PART(4)
        for (int64_t d = 0; d < size; d += 2 * LANES) {
            vi key = load_bfloat16(keys[first + j] + d, size - d);
            UNROLL(4)
            for (int n = 0; n < N; n++) {
                const float *query = queries + n * width + d;
                acc[n] = fma_(odd_of(key), load(query + LANES), fma_(even_of(key), load(query), acc[n]));
            }
        }
        UNROLL(4)
        for (int n = 0; n < N; n++) sums[n][j] = acc[n];
    }
    UNROLL(4)
    for (int n = 0; n < N; n++) store(scores[n] + first, sum_lanes(sums[n]));
}

/* out = out * factor + the sum of weights[j] * values[j] for j from first to last, in the 2 * LANES * U columns from d
   on, for queries i to i + N - 1. */
INLINE void add_columns(const Attention *a, int64_t i, const float *factors, float weights[][KEYS],
                        const uint16_t *const *values, int first, int last, int64_t d, const int N, const int U,
                        const int64_t size) {
    const int64_t width = width_for(size);
    vf acc[TOGETHER][4];
    float *out = a->out + i * width + d;
    UNROLL(4)
    for (int n = 0; n < N; n++)
        UNROLL(4)
        for (int u = 0; u < 2 * U; u++) acc[n][u] = load(out + n * width + u * LANES) * splat(factors[n]);
    for (int j = first; j <= last; j++)
        UNROLL(2)
        for (int u = 0; u < U; u++) {
            vi value = load_bfloat16(values[j] + d + u * 2 * LANES, size - d - u * 2 * LANES);
            UNROLL(4)
            for (int n = 0; n < N; n++) {
                vf weight = splat(weights[n][j]);
                acc[n][2 * u] = fma_(weight, even_of(value), acc[n][2 * u]);
                acc[n][2 * u + 1] = fma_(weight, odd_of(value), acc[n][2 * u + 1]);
            }
        }
    UNROLL(4)
    for (int n = 0; n < N; n++)
        UNROLL(4)
        for (int u = 0; u < 2 * U; u++) store(out + n * width + u * LANES, acc[n][u]);
}

/* Adds the keys from position `base` on to queries i to i + N - 1. */
INLINE void add_keys(const Attention *a, int64_t i, const int N, const int64_t size, int64_t base, int num,
                     const uint16_t *const *keys, const uint16_t *const *values) {
    const int64_t width = width_for(size);
    float scores[TOGETHER][KEYS] ALIGNED, weights[TOGETHER][KEYS] ALIGNED, sums[TOGETHER] = {0};
    float before[LANES] ALIGNED = {0}, top[LANES] ALIGNED = {0};
    int first = KEYS, last = -1;
    for (int j = 0; j < num; j += LANES) scores_of(a, i, N, size, keys, j, scores);
    for (int n = 0; n < N; n++) {
        int64_t position = a->first + (i + n) % a->tokens;
        int newest = (int)min2(position - base, num - 1); /* the newest position that this query sees */
        int oldest = a->window && position - a->window >= base ? (int)(position - a->window - base) + 1 : 0;
        before[n] = top[n] = a->top[i + n];
        if (oldest > newest) {
            if (before[n] == -INFINITY) before[n] = top[n] = 0;
            for (int j = 0; j < KEYS; j++) weights[n][j] = 0;
            continue;
        }
        if (a->cap > 0)
            for (int j = 0; j < num; j++) scores[n][j] = a->cap * tanhf(scores[n][j] / a->cap);
        if (oldest > 0 || newest < KEYS - 1)
            for (int j = 0; j < KEYS; j++) scores[n][j] = j >= oldest && j <= newest ? scores[n][j] : -INFINITY;
        vf most = load(scores[n]), sum = {0};
        for (int v = 1; v < KEYS / LANES; v++) most = larger(load(scores[n] + v * LANES), most);
        float largest = largest_lane(most);
        a->top[i + n] = top[n] = largest > before[n] ? largest : before[n];
        for (int v = 0; v < KEYS / LANES; v++) {
            vf weight = exp_(load(scores[n] + v * LANES) - splat(top[n]));
            store(weights[n] + v * LANES, weight);
            sum += weight;
        }
        sums[n] = lane_sum(sum);
        first = oldest < first ? oldest : first;
        last = newest > last ? newest : last;
    }
    float factors[LANES];
    store(factors, exp_(load(before) - load(top)));
    for (int n = 0; n < N; n++) a->totals[i + n] = a->totals[i + n] * factors[n] + sums[n];
    int64_t d = 0;
    for (; d + 4 * LANES <= width; d += 4 * LANES)
        add_columns(a, i, factors, weights, values, first, last, d, N, 2, size);
    if (d < width) add_columns(a, i, factors, weights, values, first, last, d, N, 1, size);
}

static void clear(const Attention *a, int64_t count) {
    for (int64_t i = 0; i < count; i++) a->top[i] = -INFINITY, a->totals[i] = 0;
    memset(a->out, 0, count * a->width * sizeof(float));
}

INLINE int64_t tokens_of(const Batch *b, const Task *task) {
    return min2(b->lengths[task->row] - task->first, QUERIES);
}

/* The first position of a chunk that these tokens of a row read, and the one after the last. */
INLINE Part positions_of(int64_t first, int64_t tokens, int64_t window, int64_t chunk) {
    int64_t end = first + tokens, oldest = window ? first - window + 1 : 0;
    Part part = {chunk * CHUNK, min2((chunk + 1) * CHUNK, end)};
    if (oldest > part.first) part.first = oldest / KEYS * KEYS;
    return part;
}

/* How many positions, from `position` on, are next to each other in the KV cache. at: the index of the first one's key
   and value. */
INLINE int64_t run_of(const Model *m, const Batch *b, int64_t row, int64_t position, int64_t end, int64_t *at) {
    int64_t in_page = position % b->page_size, page = b->pages[row * b->num_pages + position / b->page_size];
    *at = (page * b->page_size + in_page) * m->num_kv_heads * m->head_dim;
    return min2(b->page_size - in_page, end - position);
}

INLINE void prefetch(const void *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const uint8_t *)from + i, 0, 2);
}

static void prefetch_chunk(const Model *m, const Layer *layer, const Batch *b, int64_t index, const Task *task,
                           int64_t chunk) {
    int64_t row = task->row;
    Part part = positions_of(b->starts[row] + task->first, tokens_of(b, task), layer->window, chunk);
    for (int64_t position = part.first, run, at; position < part.end; position += run) {
        run = run_of(m, b, row, position, part.end, &at);
        int64_t bytes = run * m->num_kv_heads * m->head_dim * sizeof(uint16_t);
        prefetch(b->keys[index] + at, bytes);
        prefetch(b->values[index] + at, bytes);
    }
}

INLINE void attend_chunk_of(const Model *m, const Batch *b, const Attention *a, int64_t index, int64_t row,
                            int64_t chunk, const int64_t size) {
    int64_t per_head = m->num_heads / m->num_kv_heads * a->tokens, stride = m->num_kv_heads * size;
    Part part = positions_of(a->first, a->tokens, a->window, chunk);
    clear(a, m->num_heads * a->tokens);
    for (int64_t base = part.first; base < part.end; base += KEYS) {
        const uint16_t *keys[KEYS], *values[KEYS];
        int num = (int)min2(part.end - base, KEYS);
        for (int64_t j = 0, run, at; j < num; j += run) {
            run = run_of(m, b, row, base + j, base + num, &at);
            for (int64_t i = 0; i < run; i++)
                keys[j + i] = b->keys[index] + at + i * stride, values[j + i] = b->values[index] + at + i * stride;
        }
        for (int j = num; j < KEYS; j++) keys[j] = keys[0]; /* hidden from all queries */
        for (int64_t head = 0; head < m->num_kv_heads; head++) {
            int64_t i = head * per_head, last = i + per_head;
            for (; i + TOGETHER <= last; i += TOGETHER) add_keys(a, i, TOGETHER, size, base, num, keys, values);
            if (TOGETHER > 3 && i + 3 <= last) add_keys(a, i, 3, size, base, num, keys, values), i += 3;
            for (; i + 2 <= last; i += 2) add_keys(a, i, 2, size, base, num, keys, values);
            if (i < last) add_keys(a, i, 1, size, base, num, keys, values);
            for (int j = 0; j < KEYS; j++) keys[j] += size;
            for (int j = 0; j < num; j++) values[j] += size;
        }
    }
}

/* Computes attention to the positions of one chunk, from nothing. */
static void attend_chunk(const Model *m, const Batch *b, const Attention *a, int64_t index, int64_t row,
                         int64_t chunk) {
    if (a->size == 64) attend_chunk_of(m, b, a, index, row, chunk, 64);
    else if (a->size == 128) attend_chunk_of(m, b, a, index, row, chunk, 128);
    else attend_chunk_of(m, b, a, index, row, chunk, a->size);
}

/* Merges the result over the positions of a chunk into that over the positions before. */
static void merge(const Attention *to, const Attention *chunk, int64_t count) {
    for (int64_t first = 0; first < count; first += LANES) {
        int64_t num = min2(count - first, LANES);
        vf before = load_first(to->top + first, num), top = load_first(chunk->top + first, num);
        vf largest = larger(top, before), finite = choose(largest == splat(-INFINITY), splat(0), largest);
        vf old = exp_(before - finite), new = exp_(top - finite);
        for (int64_t l = 0; l < num; l++) {
            int64_t i = first + l;
            to->totals[i] = to->totals[i] * old[l] + chunk->totals[i] * new[l];
            to->top[i] = largest[l];
            float *out = to->out + i * to->width;
            const float *more = chunk->out + i * to->width;
            for (int64_t d = 0; d < to->width; d += LANES)
                store(out + d, load(out + d) * splat(old[l]) + load(more + d) * splat(new[l]));
        }
    }
}

/* Writes the result of some tokens, from `token` of the batch on, and sets it as the input of the next matrix. */
static void write_result(const Model *m, const Scratch *s, const Attention *a, int64_t token) {
    for (int64_t i = 0; i < m->num_heads * a->tokens; i++) {
        float *to = s->attended + ((token + i % a->tokens) * m->num_heads + i / a->tokens) * a->size;
        vf total = splat(a->totals[i]);
        for (int64_t d = 0; d < a->size; d += 2 * LANES) {
            vf even = load(a->out + i * a->width + d) / total, odd = load(a->out + i * a->width + d + LANES) / total;
            store_first(to + d, FROM(even, odd, ALTERNATING, 0), a->size - d);
            store_first(to + d + LANES, FROM(even, odd, ALTERNATING, LANES), a->size - d - LANES);
        }
    }
    int64_t columns = m->num_heads * a->size;
    for (int64_t t = token; t < token + a->tokens; t++)
        set_input(s, &s->input, s->attended + t * columns, columns, t, (Part){0, groups_of(columns)});
}

/* The state of a task that is one chunk: in its partial result. */
INLINE Attention in_partial(const Model *m, const Batch *b, const Scratch *s, const Task *task) {
    float *out = s->partials + task->partial * partial_size(m), *top = out + max_queries(m) * width_of(m);
    return (Attention){.out = out, .top = top, .totals = top + max_queries(m), .size = m->head_dim,
                       .width = width_of(m), .tokens = tokens_of(b, task)};
}

/* The chunk that a task begins with. */
INLINE int64_t first_chunk(const Layer *layer, const Batch *b, const Task *task) {
    if (task->chunk >= 0) return task->chunk;
    int64_t oldest = b->starts[task->row] + task->first - layer->window + 1;
    return layer->window && oldest > 0 ? oldest / CHUNK : 0;
}

/* Computes one task of attention: its partial result, or the result if it is not divided by chunks. The keys and values
   of its first chunk were prefetched; those of the task `next` (or NULL) are prefetched meanwhile. */
static void attend(const Model *m, const Layer *layer, const Batch *b, const Scratch *s, int64_t index,
                   const Task *task, const Task *next) {
    int64_t size = m->head_dim, tokens = tokens_of(b, task), count = m->num_heads * tokens, stride = qkv_size(m);
    int64_t token = b->offsets[task->row] + task->first, start = b->starts[task->row] + task->first;
    int64_t width = width_of(m);
    float queries[count * width] ALIGNED, own[task->chunk < 0 ? count * (width + 2) : 1] ALIGNED;
    for (int64_t i = 0; i < count; i++) {
        const float *q = s->qkv + (token + i % tokens) * stride + i / tokens * size;
        for (int64_t d = 0; d < width; d += 2 * LANES) {
            vf first = load_first(q + d, size - d), second = load_first(q + d + LANES, size - d - LANES);
            store(queries + i * width + d, FROM(first, second, EVEN_LANE, 0) * splat(m->scale));
            store(queries + i * width + d + LANES, FROM(first, second, ODD_LANE, 0) * splat(m->scale));
        }
    }
    Attention part = {queries, own, own + count * width, own + count * (width + 1), size, width, layer->window, start,
                      tokens, m->score_cap};
    if (task->chunk >= 0) {
        Attention place = in_partial(m, b, s, task);
        part.out = place.out, part.top = place.top, part.totals = place.totals;
        if (next) prefetch_chunk(m, layer, b, index, next, first_chunk(layer, b, next));
        attend_chunk(m, b, &part, index, task->row, task->chunk);
        return;
    }
    float out[count * width] ALIGNED, top[count], totals[count];
    Attention all = {NULL, out, top, totals, size, width, 0, 0, tokens, 0};
    clear(&all, count);
    for (int64_t chunk = first_chunk(layer, b, task); chunk * CHUNK < start + tokens; chunk++) {
        if ((chunk + 1) * CHUNK < start + tokens) prefetch_chunk(m, layer, b, index, task, chunk + 1);
        else if (next) prefetch_chunk(m, layer, b, index, next, first_chunk(layer, b, next));
        attend_chunk(m, b, &part, index, task->row, chunk);
        merge(&all, &part, count);
    }
    write_result(m, s, &all, token);
}

/* Merges the partial results of a block of tokens, of which `task` is the first. */
static void attend_merged(const Model *m, const Batch *b, const Scratch *s, const Task *task, const Task *end) {
    int64_t size = m->head_dim, width = width_of(m), tokens = tokens_of(b, task), count = m->num_heads * tokens;
    int64_t token = b->offsets[task->row] + task->first;
    float out[count * width] ALIGNED, top[count], totals[count];
    Attention all = {NULL, out, top, totals, size, width, 0, 0, tokens, 0};
    clear(&all, count);
    for (const Task *one = task; one < end && one->row == task->row && one->first == task->first; one++) {
        Attention part = in_partial(m, b, s, one);
        merge(&all, &part, count);
    }
    write_result(m, s, &all, token);
}
