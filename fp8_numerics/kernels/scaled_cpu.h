/* Tensors stored in low precision with one scale: Adam's update over them, and sums of gradients.
 *
 * Nothing is kept in FP32 beyond a block (stored_cpu.h).
 *
 * The order of the operations is that of optim/scaled_adam.py's torch path, whose bits are the same.
 */
#include "scaled_avx512.h"
#include "stored_cpu.h"

/* Adam in one pass: the new scales are taken to be the old ones, and the old bytes are kept while
 * new ones are written. A scale changes only when an amax passes a power of two times the largest
 * number; then what has that scale is computed again from the old bytes. */
void megafp8_scaled_adam(const struct adam *a) {
    const struct stored *all[4] = {&a->param, &a->exp_avg, &a->exp_avg_sq, &a->grad};
    const struct backup kept = backup_of(a, all);
    float scale[4], guess[3], quant[3];
    int threads = a->n < SERIAL_BELOW ? 1 : a->threads, fresh = 0, is_wrong = 0;
    int32_t p_max = 0, m_max = 0, v_max = 0;
    for (int k = 0; k < 4; k++) scale[k] = *all[k]->dequant_scale;
    for (int k = 0; k < 3; k++) guess[k] = has_scale(all[k]) ? 1.0f / scale[k] : 1.0f;
#pragma omp parallel for num_threads(threads) reduction(max : p_max, m_max, v_max) \
    schedule(static, 1)
    for (int t = 0; t < threads; t++) {
        struct block b;
        size_t begin, end;
        int32_t amax[3] = {p_max, m_max, v_max};
        share(a->n, threads, t, &begin, &end);
        begin = adam_in_registers(a, &kept, begin, end, scale, guess, amax);
        p_max = amax[0], m_max = amax[1], v_max = amax[2];
        for (; begin < end; begin += BLOCK) {
            size_t n = end - begin < BLOCK ? end - begin : BLOCK;
            for (int k = 0; k < 3; k++)
                if (is_backed_up(a, all[k])) keep_block(&kept.of[k], all[k], begin, n);
            load_block(all[0], begin, n, scale[0], b.p);
            load_block(all[1], begin, n, scale[1], b.m);
            load_block(all[2], begin, n, scale[2], b.v);
            load_block(all[3], begin, n, scale[3], b.g);
            update_block(&b, a, n, 0);
            if (has_scale(all[0])) p_max = amax_bits(b.p, n, p_max);
            if (has_scale(all[1])) m_max = amax_bits(b.m, n, m_max);
            if (has_scale(all[2])) v_max = amax_bits(b.v, n, v_max);
            store_block(all[0], begin, n, guess[0], b.p);
            store_block(all[1], begin, n, guess[1], b.m);
            store_block(all[2], begin, n, guess[2], b.v);
        }
    }
    quant[0] = new_scale(all[0], p_max);
    quant[1] = new_scale(all[1], m_max);
    quant[2] = new_scale(all[2], v_max);
    for (int k = 0; k < 3; k++) is_wrong |= !(quant[k] == guess[k]);
    if (!is_wrong) return;
    fresh = !is_backed_up(a, all[1]) | !is_backed_up(a, all[2]) << 1;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int t = 0; t < threads; t++) {
        struct block b;
        size_t begin, end;
        share(a->n, threads, t, &begin, &end);
        for (; begin < end; begin += BLOCK) {
            size_t n = end - begin < BLOCK ? end - begin : BLOCK;
            load_block(&kept.of[0], begin, n, scale[0], b.p);
            load_block(&kept.of[1], begin, n, scale[1], b.m);
            load_block(&kept.of[2], begin, n, scale[2], b.v);
            load_block(all[3], begin, n, scale[3], b.g);
            update_block(&b, a, n, fresh);
            if (!(quant[0] == guess[0])) store_block(all[0], begin, n, quant[0], b.p);
            if (!(quant[1] == guess[1])) store_block(all[1], begin, n, quant[1], b.m);
            if (!(quant[2] == guess[2])) store_block(all[2], begin, n, quant[2], b.v);
        }
    }
}

/* Adam of a part of a tensor whose scale is that of the whole. Without `writes` it finds the amaxes
 * of the part's fresh parameter and moments and changes nothing; with it, the amaxes are those of the
 * whole, and what is fresh is computed again and stored with their scales. */
void megafp8_split_adam(const struct adam *a, int writes, float *amaxes) {
    const struct stored *all[4] = {&a->param, &a->exp_avg, &a->exp_avg_sq, &a->grad};
    float scale[4], quant[3] = {1.0f, 1.0f, 1.0f};
    int threads = a->n < SERIAL_BELOW ? 1 : a->threads;
    int32_t p_max = 0, m_max = 0, v_max = 0;
    for (int k = 0; k < 4; k++) scale[k] = *all[k]->dequant_scale;
    for (int k = 0; k < 3 && writes; k++) quant[k] = new_scale(all[k], (int32_t)as_bits(amaxes[k]));
#pragma omp parallel for num_threads(threads) reduction(max : p_max, m_max, v_max) \
    schedule(static, 1)
    for (int t = 0; t < threads; t++) {
        struct block b;
        size_t begin, end;
        share(a->n, threads, t, &begin, &end);
        for (; begin < end; begin += BLOCK) {
            size_t n = end - begin < BLOCK ? end - begin : BLOCK;
            load_block(all[0], begin, n, scale[0], b.p);
            load_block(all[1], begin, n, scale[1], b.m);
            load_block(all[2], begin, n, scale[2], b.v);
            load_block(all[3], begin, n, scale[3], b.g);
            update_block(&b, a, n, 0);
            if (writes) {
                store_block(all[0], begin, n, quant[0], b.p);
                store_block(all[1], begin, n, quant[1], b.m);
                store_block(all[2], begin, n, quant[2], b.v);
            } else {
                p_max = amax_bits(b.p, n, p_max);
                m_max = amax_bits(b.m, n, m_max);
                v_max = amax_bits(b.v, n, v_max);
            }
        }
    }
    if (writes) return;
    store_amax(amaxes, p_max);
    store_amax(amaxes + 1, m_max);
    store_amax(amaxes + 2, v_max);
}

/* total += x, where the total is stored in low precision: read, add, find the scale, write. Without
 * `adds` x overwrites. */
INLINE void sum_block(const struct stored *total, const struct stored *x, int adds, float scale,
                      size_t begin, size_t n, float *sum) {
    float more[BLOCK];
    load_block(x, begin, n, *x->dequant_scale, sum);
    if (!adds) return;
    load_block(total, begin, n, scale, more);
    for (size_t i = 0; i < n; i++) sum[i] = more[i] + sum[i];
}

void megafp8_scaled_sum(const struct stored *total, const struct stored *x, size_t n, int adds,
                        int threads) {
    const float scale = *total->dequant_scale;
    int32_t max = 0;
    if (n < SERIAL_BELOW) threads = 1;
#pragma omp parallel for num_threads(threads) reduction(max : max) schedule(static, 1)
    for (int t = 0; t < threads; t++) {
        float sum[BLOCK];
        size_t begin, end;
        share(n, threads, t, &begin, &end);
        for (; begin < end; begin += BLOCK) {
            size_t count = end - begin < BLOCK ? end - begin : BLOCK;
            sum_block(total, x, adds, scale, begin, count, sum);
            max = amax_bits(sum, count, max);
        }
    }
    const float quant = new_scale(total, max);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int t = 0; t < threads; t++) {
        float sum[BLOCK];
        size_t begin, end;
        share(n, threads, t, &begin, &end);
        for (; begin < end; begin += BLOCK) {
            size_t count = end - begin < BLOCK ? end - begin : BLOCK;
            sum_block(total, x, adds, scale, begin, count, sum);
            store_block(total, begin, count, quant, sum);
        }
    }
}

/* total = the sum of `count` stored tensors, added in their order, and its amax; a NaN makes the
 * amax infinite. */
void megafp8_sum_of(const struct stored *parts, int count, size_t n, float *total, float *amax,
                    int threads) {
    int32_t max = 0;
    if (n < SERIAL_BELOW) threads = 1;
#pragma omp parallel for num_threads(threads) reduction(max : max) schedule(static, 1)
    for (int t = 0; t < threads; t++) {
        float sum[BLOCK], more[BLOCK];
        size_t begin, end;
        share(n, threads, t, &begin, &end);
        for (; begin < end; begin += BLOCK) {
            size_t size = end - begin < BLOCK ? end - begin : BLOCK;
            load_block(&parts[0], begin, size, *parts[0].dequant_scale, sum);
            for (int k = 1; k < count; k++) {
                load_block(&parts[k], begin, size, *parts[k].dequant_scale, more);
                for (size_t i = 0; i < size; i++) sum[i] = sum[i] + more[i];
            }
            max = amax_bits(sum, size, max);
            memcpy(total + begin, sum, size * sizeof(float));
        }
    }
    store_amax(amax, max);
}
