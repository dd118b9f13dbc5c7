/* Casts with a scale for each block of elements (MXFP8, NVFP4, current scaling), and back to values.
 *
 * A block lies along a row, or along a column: then rows are read one after the other, and columns
 * are the elements of a vector. The rules and the bits are those of mxfp8.py, nvfp4.py and scales.py.
 */
#include "elements_cpu.h"

#define STRIP 256 /* columns that are done together */
#define MX_BLOCK 32
#define FP4_BLOCK 16

/* A magnitude's bits, where a NaN counts as 0. */
INLINE int32_t known_magnitude(float x) {
    int32_t bits = (int32_t)(as_bits(x) & 0x7fffffffu);
    return bits > 0x7f800000 ? 0 : bits;
}

INLINE int32_t mx_code(int32_t amax) {
    uint32_t bits = as_bits(as_float((uint32_t)amax) * (1.0f / 448.0f));
    int32_t e = (int32_t)(bits >> 23), m = (int32_t)(bits & 0x7fffffu);
    e += (m > 0) & !((e == 0) & (m <= 0x400000));
    return e > 254 ? 254 : e;
}

INLINE float power_of(int32_t code) { return as_float(code ? (uint32_t)code << 23 : 0x400000u); }

INLINE void mx_line(const void *restrict x, size_t at, size_t n, int kind, uint8_t *restrict payload,
                    float *scale) {
    int32_t amax = 0;
    uint32_t number;
    for (size_t i = at; i < at + n; i++) {
        int32_t seen = known_magnitude(load(x, i, kind));
        amax = seen > amax ? seen : amax;
    }
    int32_t code = mx_code(amax);
    const float factor = power_of(254 - code);
    *scale = power_of(code);
#pragma GCC ivdep
    for (size_t i = at; i < at + n; i++) payload[i] = encode(load(x, i, kind), factor, E4M3, &number);
}

INLINE void mx_rows(const void *x, size_t begin, size_t end, size_t cols, int kind, uint8_t *payload,
                    float *scale) {
    const size_t whole = cols / MX_BLOCK, of_row = (cols + MX_BLOCK - 1) / MX_BLOCK;
    for (size_t row = begin; row < end; row++) {
        float *to = scale + row * of_row;
        for (size_t b = 0; b < whole; b++)
            mx_line(x, row * cols + b * MX_BLOCK, MX_BLOCK, kind, payload, to + b);
        if (of_row > whole)
            mx_line(x, row * cols + whole * MX_BLOCK, cols - whole * MX_BLOCK, kind, payload,
                    to + whole);
    }
}

INLINE void mx_columns(const void *restrict x, size_t begin, size_t end, size_t cols, int kind,
                       uint8_t *restrict payload, float *restrict scale) {
    int32_t amax[STRIP];
    float factor[STRIP];
    uint32_t number;
    for (size_t top = begin; top < end; top += MX_BLOCK) {
        const size_t bottom = top + MX_BLOCK < end ? top + MX_BLOCK : end;
        for (size_t left = 0; left < cols; left += STRIP) {
            const size_t n = cols - left < STRIP ? cols - left : STRIP;
            memset(amax, 0, sizeof amax);
            for (size_t row = top; row < bottom; row++)
                for (size_t j = 0; j < n; j++) {
                    int32_t seen = known_magnitude(load(x, row * cols + left + j, kind));
                    amax[j] = seen > amax[j] ? seen : amax[j];
                }
            for (size_t j = 0; j < n; j++) {
                int32_t code = mx_code(amax[j]);
                factor[j] = power_of(254 - code);
                scale[top / MX_BLOCK * cols + left + j] = power_of(code);
            }
            for (size_t row = top; row < bottom; row++)
#pragma GCC ivdep
                for (size_t j = 0; j < n; j++) {
                    size_t at = row * cols + left + j;
                    payload[at] = encode(load(x, at, kind), factor[j], E4M3, &number);
                }
        }
    }
}

/* MXFP8 of x [rows, cols]: blocks of 32 along rows, or along columns. The last block of each may be
 * shorter. */
void megafp8_mxfp8(const void *x, size_t rows, size_t cols, int kind, int along_columns,
                   uint8_t *payload, float *scale, int threads) {
    if (rows * cols < SERIAL_BELOW) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int t = 0; t < threads; t++) {
        size_t begin, end;
        share(rows, threads, t, &begin, &end); /* multiples of 64, so that no block is cut */
#define EACH(K) \
    (along_columns ? mx_columns(x, begin, end, cols, K, payload, scale) \
                   : mx_rows(x, begin, end, cols, K, payload, scale))
        if (kind == F32) EACH(F32);
        else if (kind == BF16) EACH(BF16);
        else EACH(F16);
#undef EACH
    }
}

/* How current scaling casts: the format, and which of the rules in scales.py makes the scales. */
struct current { int format, power_2, torchao; };

/* The scale of an amax, whose bits are above those of infinity if there was a NaN. */
INLINE float current_scale(int32_t amax, struct current how) {
    const float max = how.format == E4M3 ? 448.0f : 57344.0f, seen = as_float((uint32_t)amax);
    float scale;
    if (amax >= 0x7f800000 || (amax == 0 && !how.torchao)) return 1.0f;
    if (how.torchao) scale = (float)(1.0 / (seen > 1e-12 ? (double)seen : 1e-12) * (double)max);
    else scale = max / seen;
    scale = scale < 0x1.fffffep127f ? scale : 0x1.fffffep127f;
    return how.power_2 ? as_float(as_bits(scale) & 0x7f800000u) : scale;
}

INLINE void current_line(const void *restrict x, size_t at, size_t n, int kind, struct current how,
                         uint8_t *restrict payload, float *scale) {
    int32_t amax = 0;
    uint32_t number;
    for (size_t i = at; i < at + n; i++) {
        int32_t seen = (int32_t)(as_bits(load(x, i, kind)) & 0x7fffffffu);
        amax = seen > amax ? seen : amax;
    }
    const float factor = current_scale(amax, how);
    *scale = 1.0f / factor;
#pragma GCC ivdep
    for (size_t i = at; i < at + n; i++)
        payload[i] = encode(load(x, i, kind), factor, how.format, &number);
}

/* The rows from `top` to `bottom` are one block; `scale` is that of the first column. */
INLINE void current_strip(const void *restrict x, size_t top, size_t bottom, size_t left, size_t n,
                          size_t cols, size_t right, int kind, struct current how,
                          uint8_t *restrict payload, float *restrict scale) {
    int32_t amax[STRIP] = {0};
    float factor[STRIP];
    uint32_t number;
    for (size_t row = top; row < bottom; row++)
        for (size_t j = 0; j < n; j++) {
            size_t at = row * cols + left + j;
            int32_t seen = (int32_t)(as_bits(load(x, at, kind)) & 0x7fffffffu);
            amax[j] = seen > amax[j] ? seen : amax[j];
        }
    for (size_t j = 0; j < n; j += right) {
        const size_t end = j + right < n ? j + right : n;
        int32_t most = amax[j];
        for (size_t k = j; k < end; k++) most = amax[k] > most ? amax[k] : most;
        const float one = current_scale(most, how);
        for (size_t k = j; k < end; k++) factor[k] = one;
        scale[j / right] = 1.0f / one;
    }
    for (size_t row = top; row < bottom; row++)
#pragma GCC ivdep
        for (size_t j = 0; j < n; j++) {
            size_t at = row * cols + left + j;
            payload[at] = encode(load(x, at, kind), factor[j], how.format, &number);
        }
}

/* FP8 of x [rows, cols] with a scale for each `down` x `right` elements, the last of which may be
 * fewer. One of both is 1, or `right` divides STRIP. */
void megafp8_current(const void *x, size_t rows, size_t cols, int kind, size_t down, size_t right,
                     int format, int power_2, int torchao, uint8_t *payload, float *scale,
                     int threads) {
    const size_t of_row = (cols + right - 1) / right, strips = (cols + STRIP - 1) / STRIP;
    const size_t tiles = down == 1 ? rows * of_row : (rows + down - 1) / down * strips;
    if (rows * cols < SERIAL_BELOW) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (size_t tile = 0; tile < tiles; tile++) {
        const size_t per = down == 1 ? of_row : strips, step = down == 1 ? right : STRIP;
        const size_t top = tile / per * down, left = tile % per * step;
        const size_t bottom = top + down < rows ? top + down : rows;
        const size_t n = cols - left < step ? cols - left : step;
        float *to = scale + top / down * of_row + left / right;
#define OF(K, F) do { \
    const struct current how = {F, power_2, torchao}; \
    if (down == 1) current_line(x, top * cols + left, n, K, how, payload, to); \
    else current_strip(x, top, bottom, left, n, cols, right, K, how, payload, to); \
} while (0)
#define EACH(K) do { if (format == E4M3) OF(K, E4M3); else OF(K, E5M2); } while (0)
        if (kind == F32) EACH(F32);
        else if (kind == BF16) EACH(BF16);
        else EACH(F16);
#undef EACH
#undef OF
    }
}

INLINE uint16_t to_bf16(float x) {
    uint32_t bits = as_bits(x), magnitude = bits & 0x7fffffffu;
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)((int32_t)magnitude > 0x7f800000 ? 0x7fc0u : rounded);
}

INLINE void value_line(const uint8_t *restrict payload, size_t n, const float *restrict scale,
                       int is_each, void *restrict out, size_t at, int out_kind) {
#pragma GCC ivdep
    for (size_t i = 0; i < n; i++) {
        float number = as_float((uint32_t)decode_one(payload[i], E4M3) << 16);
        float value = number * (is_each ? scale[i] : scale[0]);
        if (out_kind == F32) ((float *)out)[at + i] = value;
        else ((uint16_t *)out)[at + i] = to_bf16(value);
    }
}

/* The values of numbers in E4M3 [rows, cols], with a scale for each `down` x `right` of them. */
void megafp8_block_values(const uint8_t *payload, size_t rows, size_t cols, const float *scale,
                          size_t down, size_t right, void *out, int out_kind, int threads) {
    const size_t of_row = (cols + right - 1) / right;
    if (rows * cols < SERIAL_BELOW) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int t = 0; t < threads; t++) {
        size_t begin, end;
        share(rows, threads, t, &begin, &end);
        for (size_t row = begin; row < end; row++) {
            const float *s = scale + row / down * of_row;
            const uint8_t *from = payload + row * cols;
#define LINE(N, E, K) value_line(from + j, N, s + j / right, E, out, row * cols + j, K)
#define BY(N, K) \
    for (; j + N <= cols; j += N) LINE(N, 0, K)
            size_t j = 0;
            if (right == 1 && out_kind == F32) LINE(cols, 1, F32);
            else if (right == 1) LINE(cols, 1, BF16);
            else {
                if (right == 32 && out_kind == F32) BY(32, F32);
                else if (right == 32) BY(32, BF16);
                else if (right == 16 && out_kind == F32) BY(16, F32);
                else if (right == 16) BY(16, BF16);
                for (; j < cols; j += right) {
                    size_t n = cols - j < right ? cols - j : right;
                    if (out_kind == F32) LINE(n, 0, F32);
                    else LINE(n, 0, BF16);
                }
            }
#undef BY
#undef LINE
        }
    }
}

INLINE float fp4_step(float magnitude) {
    return magnitude >= 4.0f ? 2.0f : magnitude >= 2.0f ? 1.0f : 0.5f;
}

/* The code in E4M3 of the number of E2M1 for y: to nearest, or up with the chance byte / 256. */
INLINE uint8_t fp4_code(float y, int is_random, uint8_t byte) {
    uint32_t bits = as_bits(y), sign = bits & 0x80000000u;
    int32_t magnitude = (int32_t)(bits ^ sign), is_nan = magnitude > 0x7f800000;
    float a = as_float((uint32_t)magnitude);
    if (is_random) a = a + (float)(int32_t)byte * (fp4_step(a) * 0x1p-8f);
    a = a < 6.0f ? a : 6.0f;
    const float step = fp4_step(a), large = step * 0x1.8p23f;
    float nearest = (a + large) - large;
    a = is_random && nearest > a ? nearest - step : nearest;
    uint32_t code = a == 0.0f ? 0 : (as_bits(a) >> 20) - (120u << 3);
    return (uint8_t)(is_nan ? 0x4cu : code | sign >> 24);
}

/* The factor that brings a tensor's amax to the largest number times the largest scale. */
INLINE float fp4_encoding(float amax) {
    float factor = 2688.0f / amax;
    factor = factor < 0x1.fffffep127f ? factor : 0x1.fffffep127f;
    return amax == 0.0f || factor == 0.0f ? 1.0f : factor;
}

/* NVFP4 of x [rows, cols] with a scale for each `down` x `right` elements, which divide the sizes:
 * 1 x 16, 16 x 1 or 16 x 16. `encoding` is the factor of the tensor's amax; `bytes` are random, one
 * for each element, or NULL. */
INLINE void fp4_strip(const void *restrict x, size_t top, size_t down, size_t right, size_t cols,
                      int kind, float encoding, const uint8_t *restrict bytes, int is_random,
                      uint8_t *restrict payload, float *restrict scale) {
    int32_t amax[STRIP];
    float factor[STRIP];
    const float times = encoding * (1.0f / 6.0f), back = 1.0f / encoding;
    for (size_t left = 0; left < cols; left += STRIP) {
        const size_t n = cols - left < STRIP ? cols - left : STRIP;
        memset(amax, 0, sizeof amax);
        for (size_t row = top; row < top + down; row++)
            for (size_t j = 0; j < n; j++) {
                int32_t seen = known_magnitude(load(x, row * cols + left + j, kind));
                amax[j] = seen > amax[j] ? seen : amax[j];
            }
        for (size_t j = 0; j < n; j += right) {
            int32_t most = amax[j];
            for (size_t k = 1; k < right; k++) most = amax[j + k] > most ? amax[j + k] : most;
            uint32_t number;
            encode(as_float((uint32_t)most), times, E4M3, &number);
            float inverse = 1.0f / (as_float(number) * back);
            inverse = inverse < 0x1.fffffep127f ? inverse : 0x1.fffffep127f;
            for (size_t k = 0; k < right; k++) factor[j + k] = inverse;
            scale[top / down * (cols / right) + (left + j) / right] = as_float(number);
        }
        for (size_t row = top; row < top + down; row++)
#pragma GCC ivdep
            for (size_t j = 0; j < n; j++) {
                size_t at = row * cols + left + j;
                uint8_t byte = is_random ? bytes[at] : 0;
                payload[at] = fp4_code(load(x, at, kind) * factor[j], is_random, byte);
            }
    }
}

/* The same of a tensor with this amax; `outer` is the factor from number times scale to value. */
void megafp8_nvfp4(const void *x, size_t rows, size_t cols, int kind, size_t down, size_t right,
                   const float *amax, const uint8_t *bytes, uint8_t *payload, float *scale,
                   float *outer, int threads) {
    const float factor = fp4_encoding(*amax);
    *outer = *amax / 2688.0f;
    if (rows * cols < SERIAL_BELOW) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int t = 0; t < threads; t++) {
        size_t begin, end;
        share(rows, threads, t, &begin, &end); /* multiples of 64, so that no block is cut */
        for (size_t top = begin; top < end; top += down) {
#define STRIP_OF(K, D, R, S) \
    fp4_strip(x, top, D, R, cols, K, factor, bytes, S, payload, scale)
#define OF_KIND(D, R, S) \
    (kind == F32 ? STRIP_OF(F32, D, R, S) : kind == BF16 ? STRIP_OF(BF16, D, R, S) \
                                                          : STRIP_OF(F16, D, R, S))
#define OF_BYTES(D, R) (bytes ? OF_KIND(D, R, 1) : OF_KIND(D, R, 0))
            if (down == 1) OF_BYTES(1, 16);
            else if (right == 1) OF_BYTES(16, 1);
            else OF_BYTES(16, 16);
#undef OF_BYTES
#undef OF_KIND
#undef STRIP_OF
        }
    }
}

/* Each 16 elements of a column of x [rows, cols] times diag(signs) H / 4, in BF16. The sums are in
 * FP64, so that their order changes nothing; a sum of zeros is +0. */
INLINE void rotate_strip(const void *restrict x, size_t top, size_t cols, int kind,
                         const float *restrict signs, uint16_t *restrict out) {
    double v[FP4_BLOCK][32];
    for (size_t left = 0; left < cols; left += 32) {
        const size_t n = cols - left < 32 ? cols - left : 32;
        for (size_t i = 0; i < FP4_BLOCK; i++)
            for (size_t j = 0; j < n; j++)
                v[i][j] = (double)(load(x, (top + i) * cols + left + j, kind) * signs[i]);
        for (size_t half = 1; half < FP4_BLOCK; half *= 2)
            for (size_t i = 0; i < FP4_BLOCK; i++) {
                if (i & half) continue;
                for (size_t j = 0; j < n; j++) {
                    double a = v[i][j], b = v[i + half][j];
                    v[i][j] = a + b;
                    v[i + half][j] = a - b;
                }
            }
        for (size_t i = 0; i < FP4_BLOCK; i++)
            for (size_t j = 0; j < n; j++)
                out[(top + i) * cols + left + j] = to_bf16((float)(v[i][j] * 0.25 + 0.0));
    }
}

void megafp8_rotate(const void *x, size_t rows, size_t cols, int kind, const float *signs,
                    uint16_t *out, int threads) {
    if (rows * cols < SERIAL_BELOW) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int t = 0; t < threads; t++) {
        size_t begin, end;
        share(rows, threads, t, &begin, &end);
        for (; begin < end; begin += FP4_BLOCK) {
            if (kind == F32) rotate_strip(x, begin, cols, F32, signs, out);
            else if (kind == BF16) rotate_strip(x, begin, cols, BF16, signs, out);
            else rotate_strip(x, begin, cols, F16, signs, out);
        }
    }
}
