/* Forward passes with quantized weights on a CPU: the functions that `native.py` calls.

   native.py compiles this file, with gcc or clang, for the machine it runs on. The other files of this folder are
   parts of it, in the order in which they include each other: compiler.h, threads.h, vectors.h, tiles.h, matrices.h,
   gemm.h, gemm_bfloat16.h, rows.h, model.h, scratch.h, attention.h, attention_tiles.h, layers.h.

   Sums are float32 and always in the same order: a token's result has the same bits whatever else is in the batch,
   however its prompt is cut into chunks, and wherever its pages are. Where the CPU multiplies tiles of bfloat16
   numbers (AMX), it does so for the tokens of prompts, in matrices and in attention. Generated tokens, of which there
   are few at a time, are always computed without tiles. The reference implementation is `model/quantized.py` together
   with `model.decoder.Decoder`. */

#include "layers.h"

typedef struct {
    const Model *model;
    const Batch *batch;
    const Scratch *scratch;
} Pass;

static void run_pass(const Thread *thread, const void *data) {
    const Pass *pass = data;
    const Model *model = pass->model;
    const Batch *batch = pass->batch;
    Scratch own = *pass->scratch;
    int has_prompts = own.num_decodes < batch->num_tokens;
    Part part = part_of(thread, batch->num_tokens);
    for (int64_t t = part.first; t < part.end; t++)
        gather_row(&model->embedding, batch->tokens[t], model->embedding_scale, batch->x + t * model->hidden);
    wait_for_all(thread);
    if (has_prompts) begin_tiles();
    for (int64_t index = 0; index < model->num_layers; index++) run_layer(thread, model, batch, &own, index);
    for (int64_t t = part.first; t < part.end; t++) {
        float *x = batch->x + t * model->hidden;
        norm_row(x, model->norm, model->hidden, model->eps, x);
    }
    if (has_prompts) end_tiles();
}

/* Computes the embeddings, all layers and the final norm. */
void forward(const Model *model, const Batch *batch) {
    Scratch scratch;
    lay_out(model, batch, batch->scratch, &scratch);
    list_tasks(model, batch, &scratch);
    Pass pass = {model, batch, &scratch};
    run_region(batch->num_threads, run_pass, &pass);
}

typedef struct {
    const Matrix *w;
    const float *x;
    float *y;
    Batch batch;
    Scratch scratch;
} Linear;

static void run_linear(const Thread *thread, const void *data) {
    const Linear *l = data;
    int has_tiles = l->scratch.num_decodes == 0;
    if (has_tiles) begin_tiles();
    set_inputs(thread, NULL, &l->batch, &l->scratch, 0, l->x, l->w->columns, NULL); /* a model has a norm's eps */
    apply(thread, l->w, &l->scratch.input, &l->batch, &l->scratch, l->y, 0);
    if (has_tiles) end_tiles();
}

/* The memory that linear() needs. */
int64_t rounded_bytes(int64_t rows, int64_t columns) {
    Operand unused;
    uint8_t *first = (uint8_t *)64;
    return lay_out_operand(&unused, rows, rows, columns, first) - first;
}

/* y[rows, w.rows] = x[rows, w.columns] W' + bias, with tiles (as for prompts) or without. scratch: rounded_bytes(). */
void linear(const Matrix *w, const float *x, int64_t rows, float *y, uint8_t *scratch, int64_t num_threads,
            int32_t tiles) {
    Linear l = {.w = w, .x = x, .y = y, .batch.num_tokens = rows, .scratch.num_decodes = tiles ? 0 : rows};
    lay_out_operand(&l.scratch.input, rows, rows, w->columns, scratch);
    run_region(num_threads, run_linear, &l);
}
