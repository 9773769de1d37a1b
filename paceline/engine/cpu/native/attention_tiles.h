/* Attention of the tokens of prompts, with tiles.

   Blocks of CHUNK positions begin at multiples of CHUNK and are added in order, so that a result has the same bits
   however a prompt is cut. Generated tokens take the other path, in `attention.h`, always. */

#pragma once

#include "scratch.h"

#if TILES
/* Computes a task. For each block of CHUNK positions, scores[positions, queries] = K Q', then out[head_dim, queries]
   += V' weights. Positions and dimensions are the rows of tiles, 16 queries their columns. */
static void attend_tiles(const Model *m, const Layer *layer, const Batch *b, const Scratch *s, int64_t index,
                         const TileTask *task) {
    enum { HALVES = 16 * 32, FLOATS = 16 * 16 }; /* of a tile */
    int64_t size = m->head_dim, steps = (size + 31) / 32, dims = (size + 15) / 16, stride = qkv_size(m);
    int64_t heads = m->num_heads / m->num_kv_heads;
    int64_t tokens = min2(b->lengths[task->row] - task->first, tile_tokens(m));
    int64_t count = heads * tokens, tiles = (count + 15) / 16; /* queries, by head and then by token */
    int64_t token = b->offsets[task->row] + task->first, start = b->starts[task->row] + task->first;
    uint16_t queries[tiles * steps * HALVES] ALIGNED;
    uint16_t keys[CHUNK / 16 * steps * HALVES] ALIGNED;
    uint16_t values[dims * CHUNK / 32 * HALVES] ALIGNED;
    uint16_t weights[CHUNK / 32 * HALVES] ALIGNED;
    float out[tiles * dims * FLOATS] ALIGNED, scores[CHUNK][16] ALIGNED;
    vf top[tiles], totals[tiles];
    vi positions[tiles], rows[16];
    for (int64_t q = 0; q < tiles; q++) {
        top[q] = splat(-INFINITY), totals[q] = splat(0);
        for (int64_t step = 0; step < steps; step++) {
            for (int64_t i = 0; i < 16; i++) {
                int64_t query = min2(q * 16 + i, count - 1), rest = size - step * 32;
                const float *at = s->qkv + (token + query % tokens) * stride +
                                  (task->head * heads + query / tokens) * size + step * 32;
                vf scale = splat(m->scale);
                store_bfloat16((uint16_t *)(rows + i), load_first(at, rest) * scale,
                             load_first(at + 16, rest - 16) * scale);
                positions[q][i] = start + query % tokens;
            }
            transpose_tile(rows);
            memcpy(queries + (q * steps + step) * HALVES, rows, sizeof rows);
        }
    }
    memset(out, 0, sizeof out);
    int64_t end = start + tokens, oldest = layer->window && start >= layer->window ? start - layer->window + 1 : 0;
    for (int64_t base = oldest / CHUNK * CHUNK; base < end; base += CHUNK) {
        int64_t num = min2(end - base, CHUNK);
        const uint16_t *key_rows[CHUNK], *value_rows[CHUNK];
        for (int64_t j = 0; j < num; j++) {
            int64_t position = base + j, page = b->pages[task->row * b->num_pages + position / b->page_size];
            int64_t at = ((page * b->page_size + position % b->page_size) * m->num_kv_heads + task->head) * size;
            key_rows[j] = b->keys[index] + at, value_rows[j] = b->values[index] + at;
        }
        for (int64_t j = 0; j < CHUNK; j++)
            for (int64_t step = 0; step < steps; step++) {
                vi key = j < num ? load_bfloat16(key_rows[j] + step * 32, size - step * 32) : (vi){0};
                memcpy(keys + ((j / 16 * steps + step) * 16 + j % 16) * 32, &key, sizeof key);
            }
        for (int64_t half = 0; half < CHUNK / 32; half++)
            for (int64_t d = 0; d < size; d += 32) { /* values as pairs of positions: of even and of odd dimensions */
                vi even[16], odd[16], low[16], high[16];
                for (int64_t i = 0; i < 16; i++) {
                    int64_t j = half * 32 + 2 * i;
                    vi one = j < num ? load_bfloat16(value_rows[j] + d, size - d) : (vi){0};
                    vi two = j + 1 < num ? load_bfloat16(value_rows[j + 1] + d, size - d) : (vi){0};
                    even[i] = (one & 0xffff) | two << 16;
                    odd[i] = (one >> 16 & 0xffff) | (two & (int32_t)0xffff0000);
                }
                transpose_tile(even);
                transpose_tile(odd);
                for (int i = 0; i < 8; i++) {
                    low[2 * i] = even[i], low[2 * i + 1] = odd[i];
                    high[2 * i] = even[8 + i], high[2 * i + 1] = odd[8 + i];
                }
                memcpy(values + (d / 16 * (CHUNK / 32) + half) * HALVES, low, sizeof low);
                if (d + 16 < size) memcpy(values + ((d / 16 + 1) * (CHUNK / 32) + half) * HALVES, high, sizeof high);
            }
        /* Whether some queries do not see some of these positions. */
        int hides = base + CHUNK - 1 > start || (layer->window && base <= end - 1 - layer->window);
        for (int64_t q = 0; q < tiles; q++) {
            tile_zero(0);
            tile_zero(1);
            tile_zero(2);
            tile_zero(3);
            for (int64_t step = 0; step < steps; step++) {
                tile_load(4, queries + (q * steps + step) * HALVES, 64);
                tile_load(5, keys + step * HALVES, 64);
                tile_dot(0, 5, 4);
                tile_load(6, keys + (steps + step) * HALVES, 64);
                tile_dot(1, 6, 4);
                tile_load(5, keys + (2 * steps + step) * HALVES, 64);
                tile_dot(2, 5, 4);
                tile_load(6, keys + (3 * steps + step) * HALVES, 64);
                tile_dot(3, 6, 4);
            }
            tile_store(0, scores[0], 64);
            tile_store(1, scores[16], 64);
            tile_store(2, scores[32], 64);
            tile_store(3, scores[48], 64);
            if (m->score_cap > 0) /* cap * tanh(x / cap) */
                for (int64_t j = 0; j < CHUNK; j++) {
                    vf x = load(scores[j]) * splat(2 / m->score_cap);
                    x = choose(x > splat(80), splat(80), x);
                    store(scores[j], splat(m->score_cap) - splat(2 * m->score_cap) / (exp_(x) + splat(1)));
                }
            if (hides)
                for (int64_t j = 0; j < CHUNK; j++) {
                    vi position = (vi){0} + (int32_t)(base + j), sees = position <= positions[q];
                    if (layer->window) sees &= position > positions[q] - (int32_t)layer->window;
                    store(scores[j], choose(sees, load(scores[j]), splat(-INFINITY)));
                }
            vf most = top[q], sum = {0};
            for (int64_t j = 0; j < CHUNK; j++) most = larger(load(scores[j]), most);
            vf largest = choose(most == splat(-INFINITY), splat(0), most); /* no position is visible yet */
            for (int64_t j = 0; j < CHUNK; j += 2) {
                vf one = exp_(load(scores[j]) - largest), two = exp_(load(scores[j + 1]) - largest);
                vi both = bfloat16_pairs(one, two);
                sum += one + two;
                memcpy(weights + j * 16, &both, sizeof both);
            }
            vf factor = choose(top[q] == splat(-INFINITY), splat(0), exp_(top[q] - largest));
            totals[q] = totals[q] * factor + sum, top[q] = most;
            float *sums = out + q * dims * FLOATS;
            for (int64_t i = 0; i < dims * 16; i++) store(sums + i * 16, load(sums + i * 16) * factor);
            for (int64_t d = 0; d < dims; d++, sums += FLOATS) {
                const uint16_t *at = values + d * (CHUNK / 32) * HALVES;
                tile_load(0, sums, 64);
                tile_load(4, weights, 64);
                tile_load(5, at, 64);
                tile_dot(0, 5, 4);
                tile_load(6, weights + HALVES, 64);
                tile_load(7, at + HALVES, 64);
                tile_dot(0, 7, 6);
                tile_store(0, sums, 64);
            }
        }
    }
    for (int64_t q = 0; q < tiles; q++)
        for (int64_t d = 0; d < dims; d++) {
            const float *sums = out + (q * dims + d) * FLOATS;
            for (int i = 0; i < 16; i++) rows[i] = (vi)(load(sums + i * 16) / totals[q]);
            transpose_tile(rows);
            for (int64_t i = 0; i < 16 && q * 16 + i < count; i++) {
                int64_t query = q * 16 + i, rest = size - d * 16;
                float *to = s->attended + (token + query % tokens) * m->num_heads * size +
                            (task->head * heads + query / tokens) * size + d * 16;
                memcpy(to, rows + i, min2(rest, 16) * sizeof(float));
            }
        }
}
#endif
