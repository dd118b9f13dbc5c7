/* FP8 casts for CPUs: one pass over memory each.
 *
 * quantize: payload = round_to_fp8(clamp(x * scale)), the same values in FP32 or BF16 (the "grid",
 * for a GEMM in that format), and amax = max(amax, max|x|); optionally column sums of x (a bias
 * gradient).
 * amax: max|x| alone.
 * decode: FP8 bytes back to the grid.
 * gelu: an activation and its gradient (gelu_cpu.h).
 * accumulate: a BF16 gradient into its FP32 sum.
 * column_sums: the gradient of a bias.
 * scaled_adam, scaled_sum: over tensors stored in low precision (scaled_cpu.h).
 */
#include "blocks_cpu.h"
#include "draws_cpu.h"
#include "elements_cpu.h"
#include "gelu_cpu.h"
#include "scaled_cpu.h"

/* max|x| as FP32 bits: magnitudes of floats order like integers, and NaN above infinity. */
INLINE int32_t quantize_span(const void *restrict x, size_t begin, size_t end, float scale,
                             uint8_t *restrict payload, void *restrict grid,
                             float *restrict column_sum, int kind, int format, int grid_kind) {
    int32_t amax = 0;
#pragma GCC ivdep /* payload, grid and column_sum are tensors of their own */
    for (size_t i = begin; i < end; i++) {
        float v = load(x, i, kind);
        int32_t magnitude = (int32_t)(as_bits(v) & 0x7fffffffu);
        uint32_t number;
        amax = magnitude > amax ? magnitude : amax;
        payload[i] = encode(v, scale, format, &number);
        put(grid, i, grid_kind, number);
        if (column_sum) column_sum[i - begin] += v;
    }
    return amax;
}

/* Constant kinds and format make each call its own vectorized loop. A grid in BF16 is for BF16
 * products, and their tensors are in BF16: the other kinds have a grid in FP32 or none. */
#define SPAN(K, F, SUM, G) quantize_span(x, begin, end, scale, payload, grid, SUM, K, F, G)

#if HAS_AVX512
/* The same of BF16, to a grid in BF16 or none, by a finite scale above zero, 32 at a time. */
INLINE int32_t quantize_bf16(const uint16_t *restrict x, size_t begin, size_t end, float scale,
                             uint8_t *restrict payload, uint16_t *restrict grid,
                             float *restrict column_sum, int format) {
    const __m512 factor = _mm512_set1_ps(scale);
    __m512i most = WORDS(0);
    for (size_t i = begin; i < end; i += 32) {
        const __mmask32 some = end - i < 32 ? ((__mmask32)1 << (end - i)) - 1 : ~(__mmask32)0;
        const __m512i v = _mm512_maskz_loadu_epi16(some, x + i);
        most = _mm512_max_epi16(most, _mm512_and_si512(v, WORDS(0x7fff)));
        quantize_512(v, factor, format, some, payload + i, grid ? grid + i : NULL);
        if (!column_sum) continue;
        for (size_t half = 0; half < 32; half += 16) {
            const __mmask16 these = (__mmask16)(some >> half);
            float *sum = column_sum + (i - begin) + half;
            const __m512 before = _mm512_maskz_loadu_ps(these, sum);
            _mm512_mask_storeu_ps(
                sum, these, _mm512_add_ps(before, load_512(x, i + half, BF16, these)));
        }
    }
    most = _mm512_max_epi16(most, _mm512_srli_epi32(most, 16));
    return _mm512_reduce_max_epi32(_mm512_and_si512(most, ALL_OF(0x7fff))) << 16;
}

/* Whether `quantize_bf16` serves. */
INLINE int is_for_bf16(int kind, int grid_kind, float scale) {
    return kind == BF16 && grid_kind != F32 && scale > 0.0f && scale <= 0x1.fffffep127f;
}
#endif

static int32_t quantize_any(const void *x, size_t begin, size_t end, float scale, uint8_t *payload,
                            void *grid, int kind, int format, int grid_kind) {
#if HAS_AVX512
    if (is_for_bf16(kind, grid_kind, scale))
        return format == E4M3 ? quantize_bf16(x, begin, end, scale, payload, grid, NULL, E4M3)
                              : quantize_bf16(x, begin, end, scale, payload, grid, NULL, E5M2);
#endif
#define OR_NONE(K, F) (grid_kind == NONE ? SPAN(K, F, NULL, NONE) : SPAN(K, F, NULL, F32))
#define OF_KIND(F)                                                                                 \
    (kind == F32         ? OR_NONE(F32, F)                                                         \
     : kind == F16       ? OR_NONE(F16, F)                                                         \
     : grid_kind == BF16 ? SPAN(BF16, F, NULL, BF16)                                               \
                         : OR_NONE(BF16, F))
    return format == E4M3 ? OF_KIND(E4M3) : OF_KIND(E5M2);
#undef OF_KIND
#undef OR_NONE
}

static __attribute__((nonnull)) int32_t sum_any(const void *x, size_t begin, size_t end,
                                                float scale, uint8_t *payload, void *grid,
                                                float *column_sum, int kind, int format,
                                                int grid_kind) {
#if HAS_AVX512
    if (is_for_bf16(kind, grid_kind, scale))
        return format == E4M3
                   ? quantize_bf16(x, begin, end, scale, payload, grid, column_sum, E4M3)
                   : quantize_bf16(x, begin, end, scale, payload, grid, column_sum, E5M2);
#endif
#define OF_KIND(F)                                                                                 \
    (kind == F32         ? SPAN(F32, F, column_sum, F32)                                           \
     : kind == F16       ? SPAN(F16, F, column_sum, F32)                                           \
     : grid_kind == BF16 ? SPAN(BF16, F, column_sum, BF16)                                         \
                         : SPAN(BF16, F, column_sum, F32))
    return format == E4M3 ? OF_KIND(E4M3) : OF_KIND(E5M2);
#undef OF_KIND
}
#undef SPAN

/* amax may be NULL: then nothing is recorded (evaluation, recomputation). grid_kind: F32, NONE, or
 * BF16 where x is in BF16. */
void megafp8_quantize(const void *x, size_t n, int kind, int format, const float *quant_scale,
                      uint8_t *payload, void *grid, int grid_kind, float *amax, int threads) {
    const float scale = *quant_scale;
    int32_t all = 0;
    if (n < SERIAL_BELOW) threads = 1;
#pragma omp parallel for num_threads(threads) reduction(max : all) schedule(static, 1)
    for (int t = 0; t < threads; t++) {
        size_t begin, end;
        share(n, threads, t, &begin, &end);
        int32_t bits = quantize_any(x, begin, end, scale, payload, grid, kind, format, grid_kind);
        all = bits > all ? bits : all;
    }
    if (amax) store_amax(amax, all);
}

/* The same for a matrix and with a grid, which also adds each column up, in FP32 and in the order of the rows
 * whatever the number of threads: they share the columns. column_sum is written, [cols]. */
void megafp8_quantize_and_sum(const void *x, size_t rows, size_t cols, int kind, int format,
                              const float *quant_scale, uint8_t *payload, void *grid,
                              int grid_kind, float *amax, float *column_sum, int threads) {
    const float scale = *quant_scale;
    int32_t all = 0;
    if (rows * cols < SERIAL_BELOW) threads = 1;
    memset(column_sum, 0, cols * sizeof(float));
#pragma omp parallel for num_threads(threads) reduction(max : all) schedule(static, 1)
    for (int t = 0; t < threads; t++) {
        size_t begin, end;
        share(cols, threads, t, &begin, &end);
        for (size_t row = 0; row < rows && begin < end; row++) {
            size_t at = row * cols;
            int32_t bits = sum_any(x, at + begin, at + end, scale, payload, grid,
                                   column_sum + begin, kind, format, grid_kind);
            all = bits > all ? bits : all;
        }
    }
    if (amax) store_amax(amax, all);
}

INLINE int32_t amax_span(const void *restrict x, size_t begin, size_t end, int kind) {
    int32_t amax = 0;
    int16_t bf16 = 0; /* so that one vector holds 32 numbers in BF16 */
    for (size_t i = begin; i < end; i++) {
        if (kind == BF16) {
            const int16_t magnitude = ((const int16_t *)x)[i] & 0x7fff;
            bf16 = magnitude > bf16 ? magnitude : bf16;
        } else {
            const int32_t magnitude = (int32_t)(as_bits(load(x, i, kind)) & 0x7fffffffu);
            amax = magnitude > amax ? magnitude : amax;
        }
    }
    return kind == BF16 ? bf16 << 16 : amax;
}

/* `amax` becomes max|x|, or infinity if there is a NaN. */
void megafp8_amax(const void *x, size_t n, int kind, float *amax, int threads) {
    int32_t all = 0;
    if (n < SERIAL_BELOW) threads = 1;
#pragma omp parallel for num_threads(threads) reduction(max : all) schedule(static, 1)
    for (int t = 0; t < threads; t++) {
        size_t begin, end;
        share(n, threads, t, &begin, &end);
        int32_t bits = kind == F32    ? amax_span(x, begin, end, F32)
                       : kind == BF16 ? amax_span(x, begin, end, BF16)
                                      : amax_span(x, begin, end, F16);
        all = bits > all ? bits : all;
    }
    *amax = 0.0f;
    store_amax(amax, all);
}

INLINE void decode_span(const uint8_t *restrict payload, size_t begin, size_t end,
                        void *restrict grid, int format, int grid_kind) {
    size_t i = begin;
#if HAS_AVX512
    if (format == E4M3 && grid_kind == BF16)
        for (; i + 32 <= end; i += 32) {
            const __m512i codes =
                _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(payload + i)));
            const __m512i bits = _mm512_mask_mov_epi16(decode_512(codes), is_nan_of_e4m3(codes),
                                                       WORDS(0x7fc0));
            _mm512_storeu_si512((uint16_t *)grid + i, words_with_sign(bits, codes));
        }
#endif
#pragma GCC ivdep
    for (; i < end; i++)
        put(grid, i, grid_kind, (uint32_t)decode_one(payload[i], format) << 16);
}

void megafp8_decode(const uint8_t *payload, size_t n, int format, void *grid, int grid_kind,
                    int threads) {
    if (n < SERIAL_BELOW) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int t = 0; t < threads; t++) {
        size_t begin, end;
        share(n, threads, t, &begin, &end);
        if (format == E4M3 && grid_kind == F32) decode_span(payload, begin, end, grid, E4M3, F32);
        else if (format == E4M3) decode_span(payload, begin, end, grid, E4M3, BF16);
        else if (grid_kind == F32) decode_span(payload, begin, end, grid, E5M2, F32);
        else decode_span(payload, begin, end, grid, E5M2, BF16);
    }
}

/* Each column of x [rows, cols], in BF16 or FP16, added up in FP32 and in the order of the rows, as by
 * megafp8_quantize_and_sum; a sum stays in a register for four rows. */
INLINE void sum_columns(const void *restrict x, size_t rows, size_t cols, size_t begin, size_t end,
                        float *restrict sum, int kind) {
    size_t row = 0;
    for (; row + 4 <= rows; row += 4)
        for (size_t j = begin, at = row * cols; j < end; j++)
            sum[j] = (((sum[j] + load(x, at + j, kind)) + load(x, at + cols + j, kind)) +
                      load(x, at + 2 * cols + j, kind)) + load(x, at + 3 * cols + j, kind);
    for (; row < rows; row++)
        for (size_t j = begin; j < end; j++) sum[j] += load(x, row * cols + j, kind);
}

void megafp8_column_sums(const void *x, size_t rows, size_t cols, int kind, float *sum,
                         int threads) {
    if (rows * cols < SERIAL_BELOW) threads = 1;
    memset(sum, 0, cols * sizeof *sum);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int t = 0; t < threads; t++) {
        size_t begin, end;
        share(cols, threads, t, &begin, &end);
        if (kind == BF16) sum_columns(x, rows, cols, begin, end, sum, BF16);
        else sum_columns(x, rows, cols, begin, end, sum, F16);
    }
}

/* sum += x for a gradient in BF16 and its FP32 sum: one pass, where torch makes two. */
void megafp8_accumulate(float *restrict sum, const uint16_t *restrict x, size_t n, int threads) {
    if (n < SERIAL_BELOW) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int t = 0; t < threads; t++) {
        size_t begin, end;
        share(n, threads, t, &begin, &end);
        for (size_t i = begin; i < end; i++) sum[i] += as_float((uint32_t)x[i] << 16);
    }
}

/* Whether the functions above use the threads that they are given. */
int megafp8_has_threads(void) {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}
