/* The layers of a decoder.

   All threads of a region call each function and divide its work, except multiply_gate() and apply_tile(), which are
   part of it. Each function that writes what others read ends with wait_for_all(): a barrier costs about a
   microsecond, so work that needs none in between belongs into one loop. The reference implementation is
   `model.decoder.Decoder`. */

#pragma once

#include "attention.h"
#include "attention_tiles.h"
#include "rows.h"

/* Stores x, or norm(x), as the inputs of a matrix with `columns` columns, from token `first` on. Where there are fewer
   tokens than threads, the threads divide rows. */
static void set_inputs(const Thread *thread, const Model *m, const Batch *b, const Scratch *s, int64_t first,
                       const float *x, int64_t columns, const float *norm) {
    int64_t tokens = b->num_tokens - first, per_token = (thread->count + tokens - 1) / tokens;
    int64_t groups = groups_of(columns);
    Part part = part_of(thread, tokens * per_token);
    for (int64_t i = part.first; i < part.end; i++) {
        int64_t token = first + i / per_token, piece = i % per_token;
        const float *row = x + token * columns;
        float normed[norm ? columns : 1];
        if (norm) norm_row(row, norm, columns, m->eps, normed);
        set_input(s, &s->input, norm ? normed : row, columns, token,
                  (Part){groups * piece / per_token, groups * (piece + 1) / per_token});
    }
    wait_for_all(thread);
}

/* Computes a tile of the channels of y = matrix(input), or with `add` of y += matrix(input). */
static void apply_tile(const Matrix *w, const Operand *input, int64_t tile, const Batch *b, const Scratch *s, float *y,
                       int add) {
    Rounded x = input->rounded;
    x.columns = groups_of(w->columns) * GROUP;
    gemm(w, tile, &x, s->num_decodes, y, add);
#if TILES
    if (s->num_decodes < b->num_tokens)
        gemm_bfloat16(w, tile, input->bfloat16, b->num_tokens - s->num_decodes, y + s->num_decodes * w->rows, add);
#endif
}

/* y = matrix(input), or with `add` y += matrix(input). */
static void apply(const Thread *thread, const Matrix *w, const Operand *input, const Batch *b, const Scratch *s,
                  float *y, int add) {
    Loop tiles = loop_of(thread, tiles_of(w));
    for (int64_t tile; (tile = take(&tiles)) >= 0;) apply_tile(w, input, tile, b, s, y, add);
    wait_for_all(thread);
}

/* y += what the adapters of the tokens add to a matrix whose input is x, or norm(x). at: index of layer and matrix. */
static void add_adapters(const Thread *thread, const Model *m, const Batch *b, int64_t at, const float *x,
                         int64_t stride, int64_t columns, const float *norm, float *y, int64_t y_stride) {
    if (!b->adapters) return;
    /* In turns instead of parts: neighbours have the same adapter, or none. */
    for (int64_t t = thread->index; t < b->num_tokens; t += thread->count) {
        const Adapter *own = b->adapters[t] ? b->adapters[t] + at : NULL;
        if (!own || !own->num_parts) continue;
        float normed[norm ? columns : 1], between[MAX_RANK];
        const float *input = x + t * stride;
        if (norm) {
            norm_row(input, norm, columns, m->eps, normed);
            input = normed;
        }
        for (const LowRank *part = own->parts; part < own->parts + own->num_parts; part++) {
            float *out = y + t * y_stride + part->first;
            for (int64_t r = 0; r < part->rank; r++) between[r] = dot(input, part->a + r * columns, columns);
            for (int64_t i = 0; i < part->rows; i++) out[i] += dot(between, part->b + i * part->rank, part->rank);
        }
    }
    wait_for_all(thread);
}

/* x += matrix(input), or x += norm(matrix(input)) where the model has a norm there. unrounded: the input, for
   adapters. */
static void add_block(const Thread *thread, const Model *m, const Matrix *w, const Operand *input, const Batch *b,
                      Scratch *s, const float *post_norm, int64_t at, const float *unrounded, int64_t stride) {
    float *out = post_norm ? s->block : b->x;
    apply(thread, w, input, b, s, out, !post_norm);
    add_adapters(thread, m, b, at, unrounded, stride, w->columns, NULL, out, m->hidden);
    if (!post_norm) return;
    Part part = part_of(thread, b->num_tokens);
    for (int64_t t = part.first; t < part.end; t++) {
        const float *y = s->block + t * m->hidden;
        float factor = inverse_rms(y, m->hidden, m->eps), *x = b->x + t * m->hidden;
        for (int64_t i = 0; i < m->hidden; i++) x[i] += y[i] * factor * post_norm[i];
    }
    wait_for_all(thread);
}

/* Computes a group of the inputs of `down`: activation(gate) * up. */
static void multiply_gate(const Model *m, const Batch *b, const Scratch *s, int64_t group) {
    for (int64_t t = 0; t < b->num_tokens; t++) {
        float *gate = s->gate_up + t * 2 * m->ffn, *up = gate + m->ffn;
        for (int64_t i = group * GROUP; i < (group + 1) * GROUP && i < m->ffn; i += LANES) {
            /* Both activations are x * sigmoid(u): (1 + tanh(v)) / 2 is sigmoid(2 v). */
            vf x = load_first(gate + i, m->ffn - i), u = x;
            if (m->activation) u = splat(1.5957691216f) * (x + splat(0.044715f) * x * x * x);
            vf negated = choose(u < splat(-88.0f), splat(88.0f), -u);
            vf value = x / (splat(1.0f) + exp_(negated)) * load_first(up + i, m->ffn - i);
            store_first(gate + i, value, m->ffn - i);
        }
        set_input(s, &s->gated, gate, m->ffn, t, (Part){group, group + 1});
    }
}

static void run_layer(const Thread *thread, const Model *m, const Batch *b, Scratch *s, int64_t index) {
    const Layer *layer = m->layers + index;
    int64_t size = m->head_dim, num_qk = m->num_heads + m->num_kv_heads, stride = qkv_size(m);
    set_inputs(thread, m, b, s, 0, b->x, m->hidden, layer->attention_norm);
    apply(thread, &layer->qkv, &s->input, b, s, s->qkv, 0);
    int64_t at = index * NUM_ADAPTED;
    add_adapters(thread, m, b, at + QKV, b->x, m->hidden, m->hidden, layer->attention_norm, s->qkv, stride);
    const Part tokens = part_of(thread, b->num_tokens);
    for (int64_t t = tokens.first; t < tokens.end; t++) {
        float *heads = s->qkv + t * stride, *keys = heads + m->num_heads * size;
        if (layer->qk_norm && m->full_qk_norm) {
            norm_row(heads, layer->qk_norm, m->num_heads * size, m->eps, heads);
            norm_row(keys, layer->qk_norm + m->num_heads * size, m->num_kv_heads * size, m->eps, keys);
        }
        for (int64_t h = 0; h < num_qk; h++) {
            float *one = heads + h * size;
            if (layer->qk_norm && !m->full_qk_norm) norm_row(one, layer->qk_norm + h * size, size, m->eps, one);
            if (layer->rope) rotate(one, layer->rope + b->positions[t] * size, size);
        }
        int64_t at = b->kv_indices[t] * m->num_kv_heads * size;
        to_bfloat16(keys, m->num_kv_heads * size, b->keys[index] + at);
        to_bfloat16(heads + num_qk * size, m->num_kv_heads * size, b->values[index] + at);
    }
    Part own = part_of(thread, s->num_tasks);
    const Task *first = s->tasks + own.first;
    if (own.first < own.end) prefetch_chunk(m, layer, b, index, first, first_chunk(layer, b, first));
    wait_for_all(thread);
    Loop tasks = loop_of(thread, s->num_tasks);
    for (int64_t task; (task = take(&tasks)) >= 0;)
        attend(m, layer, b, s, index, s->tasks + task, task + 1 < tasks.part.end ? s->tasks + task + 1 : NULL);
    wait_for_all(thread);
#if TILES
    if (s->num_tile_tasks) {
        Loop tile_tasks = loop_of(thread, s->num_tile_tasks);
        for (int64_t task; (task = take(&tile_tasks)) >= 0;)
            attend_tiles(m, layer, b, s, index, s->tile_tasks + task);
        wait_for_all(thread);
    }
#endif
    if (s->num_partials) {
        Part part = part_of(thread, s->num_tasks);
        for (int64_t task = part.first; task < part.end; task++)
            if (s->tasks[task].chunk == 0) attend_merged(m, b, s, s->tasks + task, s->tasks + s->num_tasks);
        wait_for_all(thread);
    }
    if (s->num_decodes < b->num_tokens) /* attend() has stored the inputs of generated tokens */
        set_inputs(thread, m, b, s, s->num_decodes, s->attended, m->num_heads * size, NULL);
    add_block(thread, m, &layer->out, &s->input, b, s, layer->attention_post_norm, at + OUT, s->attended,
              m->num_heads * size);

    set_inputs(thread, m, b, s, 0, b->x, m->hidden, layer->mlp_norm);
    /* Whether one index of the loop computes a group of gate, of up and of their product. */
    int together = m->ffn % GROUP == 0 && !b->adapters;
    if (!together) {
        apply(thread, &layer->gate_up, &s->input, b, s, s->gate_up, 0);
        add_adapters(thread, m, b, at + GATE_UP, b->x, m->hidden, m->hidden, layer->mlp_norm, s->gate_up, 2 * m->ffn);
    }
    Loop groups = loop_of(thread, groups_of(m->ffn));
    for (int64_t group; (group = take(&groups)) >= 0;) {
        for (int64_t tile = group * GROUP / TILE; together && tile < (group + 1) * GROUP / TILE; tile++) {
            apply_tile(&layer->gate_up, &s->input, tile, b, s, s->gate_up, 0);
            apply_tile(&layer->gate_up, &s->input, tile + m->ffn / TILE, b, s, s->gate_up, 0);
        }
        multiply_gate(m, b, s, group);
    }
    wait_for_all(thread);
    add_block(thread, m, &layer->down, &s->gated, b, s, layer->mlp_post_norm, at + DOWN, s->gate_up, 2 * m->ffn);
}
