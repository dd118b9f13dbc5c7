/* Casts with a scale for each block of elements (MXFP8, NVFP4, current scaling), and back to
 * values.
 *
 * A strip of columns is done at a time, row after row, so that the columns are the elements of a
 * vector whether a block lies along a row or along a column. The rules and the bits are those of
 * mxfp8.py, nvfp4.py and scales.py.
 */
#include "elements_avx512.h"
#include "elements_cpu.h"

#define STRIP 256 /* columns that are done together */
#define FP4_BLOCK 16

enum { MX, CURRENT, FP4 }; /* the rules */

/* A cast of x [rows, cols] with a scale for each `down` x `right` elements, the last of which may
 * be fewer. `power_2` and `torchao` choose current scaling's rule; `encoding` is the factor of
 * NVFP4's amax, and `bytes` are random, one for each element, or NULL. `values` are what the codes,
 * in E4M3, and the scales stand for, in `value_kind`, or NULL. */
struct blocks {
    const void *x;
    size_t rows, cols, down, right;
    int kind, rule, format;
    uint8_t *payload;
    float *scale;
    void *values;
    int value_kind;
    int power_2, torchao;
    float encoding;
    const uint8_t *bytes;
};

INLINE float at_most_largest(float x) { return x < 0x1.fffffep127f ? x : 0x1.fffffep127f; }

INLINE int32_t mx_code(int32_t amax) {
    uint32_t bits = as_bits(as_float((uint32_t)amax) * (1.0f / 448.0f));
    int32_t e = (int32_t)(bits >> 23), m = (int32_t)(bits & 0x7fffffu);
    e += (m > 0) & !((e == 0) & (m <= 0x400000));
    return e > 254 ? 254 : e;
}

INLINE float power_of(int32_t code) { return as_float(code ? (uint32_t)code << 23 : 0x400000u); }

/* The factor of current scaling. The amax is above infinity if there was a NaN. */
INLINE float current_factor(int32_t amax, struct blocks b, int format) {
    const float max = format == E4M3 ? 448.0f : 57344.0f, seen = as_float((uint32_t)amax);
    float factor;
    if (amax >= 0x7f800000 || (amax == 0 && !b.torchao)) return 1.0f;
    if (b.torchao) factor = (float)(1.0 / (seen > 1e-12 ? (double)seen : 1e-12) * (double)max);
    else factor = max / seen;
    factor = at_most_largest(factor);
    return b.power_2 ? as_float(as_bits(factor) & 0x7f800000u) : factor;
}

/* What a block with this amax (its bits) is multiplied by; its numbers are times `scale`. */
INLINE float factor_of(int32_t amax, struct blocks b, int rule, int format, float *scale) {
    if (rule == MX) {
        int32_t code = mx_code(amax);
        *scale = power_of(code);
        return power_of(254 - code);
    }
    if (rule == CURRENT) {
        const float factor = current_factor(amax, b, format);
        *scale = 1.0f / factor;
        return factor;
    }
    uint32_t number;
    encode(as_float((uint32_t)amax), b.encoding * (1.0f / 6.0f), E4M3, &number);
    *scale = as_float(number);
    return at_most_largest(1.0f / (as_float(number) * (1.0f / b.encoding)));
}

/* `encode` of a number that is not NaN and rounds to none above the format's largest. The last byte
 * of the sum is k of elements_cpu.h less that of emin, which is even and so changes no tie; the
 * bits of the exponent are added to it. */
INLINE uint8_t encode_known(float x, float factor, int format) {
    const int32_t mb = format == E4M3 ? 3 : 2;
    const int32_t emin = (format == E4M3 ? 127 - 6 : 127 - 14) << 23;
    const float y = as_float(as_bits(x) & 0x7fffffffu) * factor;
    int32_t e = (int32_t)(as_bits(y) & 0x7f800000u);
    e = e > emin ? e : emin;
    int32_t m = e + (((23 - mb) << 23 | 0x400000) - (emin >> (23 - mb)));
    uint32_t code = as_bits(y + as_float((uint32_t)m)) + (uint32_t)(e >> (23 - mb));
    return (uint8_t)((code & 0x7fu) | (as_bits(x) >> 24 & 0x80u));
}

/* The distance of numbers of E2M1 from `magnitude` on: half the power of two below it, or of 1. */
INLINE float fp4_step(float magnitude) {
    int32_t e = (int32_t)(as_bits(magnitude) & 0x7f800000u);
    e = e > 127 << 23 ? e : 127 << 23;
    return as_float((uint32_t)(e - (1 << 23)));
}

/* The code in E4M3 of the number of E2M1 for x * factor: to nearest, or up by the chance
 * byte / 256. */
INLINE uint8_t fp4_code(float x, float factor, int is_random, uint8_t byte) {
    const int32_t zero = 120 << 3;
    float a = as_float(as_bits(x) & 0x7fffffffu) * factor;
    if (is_random) a = a + (float)(int32_t)byte * (fp4_step(a) * 0x1p-8f);
    a = a < 6.0f ? a : 6.0f;
    const float step = fp4_step(a), large = step * 0x1.8p23f;
    const float nearest = (a + large) - large;
    a = is_random && nearest > a ? nearest - step : nearest;
    int32_t code = (int32_t)(as_bits(a) >> 20);
    return (uint8_t)(((code > zero ? code : zero) - zero) | (int32_t)(as_bits(x) >> 24 & 0x80u));
}

/* The code of one element; `is_known` says that the block has no NaN and no infinity. */
INLINE uint8_t block_code(float x, float factor, int rule, int format, int is_known, int is_random,
                          uint8_t byte) {
    uint32_t number;
    if (rule == FP4) {
        uint8_t code = fp4_code(x, factor, is_random, byte);
        int is_nan = (int32_t)(as_bits(x) & 0x7fffffffu) > 0x7f800000;
        return is_nan && !is_known ? 0x4c : code;
    }
    return is_known ? encode_known(x, factor, format) : encode(x, factor, format, &number);
}

/* The largest magnitude of each block of `right` columns, a power of two, as bits of its own
 * format, which have the order of the numbers; what is above `last` counts as 0. */
#define MAGNITUDES(NAME, T, ALL)                                                                   \
    INLINE void NAME(const T *restrict x, size_t rows, size_t cols, size_t n, size_t right,        \
                     T last, T *restrict amax) {                                                   \
        memset(amax, 0, STRIP * sizeof *amax);                                                     \
        for (size_t row = 0; row < rows; row++)                                                    \
            for (size_t j = 0; j < n; j++) {                                                       \
                T seen = x[row * cols + j] & ALL;                                                  \
                seen = seen > last ? 0 : seen;                                                     \
                amax[j] = seen > amax[j] ? seen : amax[j];                                         \
            }                                                                                      \
        for (size_t s = 1; s < right; s *= 2)                                                      \
            _Pragma("GCC ivdep") for (size_t j = 0; j < STRIP / (2 * s); j++) amax[j] =            \
                amax[2 * j] > amax[2 * j + 1] ? amax[2 * j] : amax[2 * j + 1];                     \
    }
MAGNITUDES(magnitudes_32, int32_t, 0x7fffffff)
MAGNITUDES(magnitudes_16, int16_t, 0x7fff)
#undef MAGNITUDES

#if HAS_AVX512
/* The same of one row and of blocks of 16 or 32, each reduced by itself; nothing is left out. */
INLINE void magnitudes_of_row(const void *x, size_t at, size_t n, size_t right, int kind,
                              int32_t *restrict amax, int16_t *restrict narrow) {
    memset(amax, 0, STRIP / right * sizeof *amax);
    memset(narrow, 0, STRIP / right * sizeof *narrow);
    for (size_t j = 0, block = 0; j < n; j += right, block++) {
        const size_t here = n - j < right ? n - j : right;
        const __mmask32 some = (__mmask32)(((uint64_t)1 << here) - 1);
        if (kind == F32) {
            const int32_t *from = (const int32_t *)x + at + j;
            const __m512i low = _mm512_maskz_loadu_epi32((__mmask16)some, from);
            const __m512i high = _mm512_maskz_loadu_epi32((__mmask16)(some >> 16), from + 16);
            const __m512i all = ALL_OF(0x7fffffff);
            amax[block] = _mm512_reduce_max_epi32(
                _mm512_max_epi32(_mm512_and_si512(low, all), _mm512_and_si512(high, all)));
            continue;
        }
        const __m512i row =
            _mm512_andnot_si512(_mm512_maskz_loadu_epi16(some, (const int16_t *)x + at + j),
                                WORDS(0x7fff)); /* the least of these is the largest magnitude */
        const __m256i half =
            _mm256_min_epu16(_mm512_castsi512_si256(row), _mm512_extracti64x4_epi64(row, 1));
        const __m128i quarter =
            _mm_min_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
        narrow[block] = (int16_t)(0x7fff - _mm_extract_epi16(_mm_minpos_epu16(quarter), 0));
    }
}
#endif

/* The same as bits of FP32; NaN counts as 0 if it is ignored. Returns whether all are finite.
 * The functions that depend on the kind, on the block and on the rule are not inlined, so that each
 * is compiled once and not for every combination. */
static __attribute__((noinline)) int find_amax(const struct blocks *b, size_t at, size_t rows,
                                               size_t n, int ignores_nan, int32_t *restrict amax) {
    const size_t right = b->right, cols = b->cols;
    const int kind = b->kind;
    const int32_t last = !ignores_nan ? 0x7fffffff : kind == F16 ? 0x7c007fff : 0x7f800000;
    int16_t narrow[STRIP];
    int32_t wide[STRIP], most = 0;
#define OF(RIGHT)                                                                                  \
    if (kind == F32) magnitudes_32((const int32_t *)b->x + at, rows, cols, n, RIGHT, last, wide);  \
    else                                                                                           \
        magnitudes_16((const int16_t *)b->x + at, rows, cols, n, RIGHT, (int16_t)(last >> 16),     \
                      narrow)
#if HAS_AVX512
#define IN_ROW(RIGHT, K) magnitudes_of_row(b->x, at, n, RIGHT, K, wide, narrow)
    if (rows == 1 && !ignores_nan && (right == 16 || right == 32)) {
        if (right == 16 && kind == F32) IN_ROW(16, F32);
        else if (right == 16) IN_ROW(16, BF16);
        else if (kind == F32) IN_ROW(32, F32);
        else IN_ROW(32, BF16);
    } else
#undef IN_ROW
#endif
    if (right == 1) {
        OF(1);
    } else if (right == 16) {
        OF(16);
    } else if (right == 32) {
        OF(32);
    } else {
        OF(right);
    }
#undef OF
    if (kind == BF16)
        for (size_t j = 0; j < STRIP / right; j++)
            amax[j] = (int32_t)as_bits(load(narrow, j, BF16));
    else if (kind == F16)
        for (size_t j = 0; j < STRIP / right; j++) amax[j] = (int32_t)as_bits(load(narrow, j, F16));
    else memcpy(amax, wide, STRIP / right * sizeof *amax);
    for (size_t j = 0; j < STRIP / right; j++) most = amax[j] > most ? amax[j] : most;
    return most < 0x7f800000;
}

/* Scales of some blocks, and what their numbers are multiplied by. */
static __attribute__((noinline)) void find_factors(const struct blocks *from, size_t num,
                                                   const int32_t *restrict amax,
                                                   float *restrict scales, float *restrict factor) {
    const struct blocks b = *from; /* a copy, which no store to floats can change */
#define OF(RULE, FORMAT)                                                                           \
    for (size_t j = 0; j < num; j++) factor[j] = factor_of(amax[j], b, RULE, FORMAT, scales + j)
    if (b.rule == MX) OF(MX, E4M3);
    else if (b.rule == FP4) OF(FP4, E4M3);
    else if (b.format == E4M3) OF(CURRENT, E4M3);
    else OF(CURRENT, E5M2);
#undef OF
}

/* For each column of a strip what its block has. */
INLINE void widen(const float *restrict of_block, size_t right, float *restrict out) {
#define OF(RIGHT)                                                                                  \
    for (size_t j = 0; j < STRIP / RIGHT; j++)                                                     \
        for (size_t k = 0; k < RIGHT; k++) out[j * RIGHT + k] = of_block[j]
    if (right == 1) memcpy(out, of_block, STRIP * sizeof *out);
    else if (right == 16) OF(16);
    else if (right == 32) OF(32);
    else OF(right);
#undef OF
}

/* Whether the product of any number of E4M3 and any of these scales is a BF16 number: a scale is 0 or
 * has at most four significant bits, as the numbers have, and no product leaves the normal range. */
INLINE int are_short(const float *restrict scale, size_t num) {
    int32_t is_other = 0;
    for (size_t j = 0; j < num; j++) {
        const int32_t bits = (int32_t)as_bits(scale[j]);
        is_other |= (bits & (int32_t)0x800fffff) | ((bits < 10 << 23) & (bits != 0)) |
                    (bits >= 246 << 23);
    }
    return !is_other;
}

/* A strip's factors, one for each column, from the scales of blocks of `right`. In BF16 a power of
 * two is added to a number's exponent if no number of E4M3 leaves the normal range by it: then
 * `added` has these bits, and the result is 1. */
INLINE int spread(const float *restrict scale, size_t left, size_t n, size_t right,
                  float *restrict factor, uint16_t *restrict added) {
    int32_t is_other = 0;
    for (size_t j = 0; j < (left % right + n + right - 1) / right; j++) {
        const int32_t bits = (int32_t)as_bits(scale[j]);
        is_other |= (bits & (int32_t)0x807fffff) | (bits < 10 << 23) | (bits >= 247 << 23);
    }
    for (size_t j = 0, end; j < n; j = end, scale++) {
        end = j + right - (left + j) % right;
        end = end < n ? end : n;
        for (size_t k = j; k < end; k++) {
            factor[k] = *scale;
            added[k] = (uint16_t)((as_bits(*scale) >> 16) - (127 << 7));
        }
    }
    return !is_other;
}

/* Values of n numbers from `at` on: by factors, or by what is added to the bits of BF16. */
INLINE void value_row(const uint8_t *restrict payload, size_t at, size_t n,
                      const float *restrict factor, const uint16_t *restrict added, int adds,
                      void *restrict out, int out_kind) {
    size_t j = 0;
#if HAS_AVX512
    for (; j + 32 <= n; j += 32) {
        const __m512i codes =
            _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(payload + at + j)));
        __m512i bits = decode_512(codes);
        if (adds) {
            const __mmask32 is_some = _mm512_test_epi16_mask(bits, bits);
            bits = _mm512_mask_add_epi16(bits, is_some, bits, _mm512_loadu_si512(added + j));
            bits = words_with_sign(bits, codes);
            bits = _mm512_mask_mov_epi16(bits, is_nan_of_e4m3(codes), WORDS(0x7fc0));
            _mm512_storeu_si512((uint16_t *)out + at + j, bits);
            continue;
        }
        bits = _mm512_mask_mov_epi16(bits, is_nan_of_e4m3(codes), WORDS(0x7fc0));
        bits = words_with_sign(bits, codes);
        for (size_t half = 0; half < 2; half++) {
            const __m256i part =
                half ? _mm512_extracti64x4_epi64(bits, 1) : _mm512_castsi512_si256(bits);
            const __m512 number = FLOATS(_mm512_slli_epi32(_mm512_cvtepu16_epi32(part), 16));
            const size_t i = j + 16 * half;
            const __m512 value = _mm512_mul_ps(number, _mm512_loadu_ps(factor + i));
            if (out_kind == F32) _mm512_storeu_ps((float *)out + at + i, value);
            else _mm256_storeu_si256((__m256i *)((uint16_t *)out + at + i), to_bf16_512(value));
        }
    }
#else
    if (adds)
#pragma GCC ivdep
        for (; j < n; j++) {
            const uint16_t bits = decode_one(payload[at + j], E4M3), size = bits & 0x7fff;
            const uint16_t value = size ? (uint16_t)(bits + added[j]) : bits;
            ((uint16_t *)out)[at + j] = size > 0x7f80 ? 0x7fc0 : value;
        }
#endif
#pragma GCC ivdep
    for (; j < n; j++) {
        const float value = as_float((uint32_t)decode_one(payload[at + j], E4M3) << 16) * factor[j];
        if (out_kind == F32) ((float *)out)[at + j] = value;
        else ((uint16_t *)out)[at + j] = to_bf16(value);
    }
}

INLINE void value_rows(const uint8_t *payload, size_t top, size_t bottom, size_t left, size_t n,
                       size_t cols, const float *scale, size_t right, void *out, int out_kind) {
    float factor[STRIP];
    uint16_t added[STRIP];
    const int adds = spread(scale, left, n, right, factor, added) && out_kind == BF16;
    for (size_t row = top; row < bottom; row++) {
        if (adds) value_row(payload, row * cols + left, n, factor, added, 1, out, BF16);
        else value_row(payload, row * cols + left, n, factor, added, 0, out, out_kind);
    }
}

/* Codes of n elements from `at` on, each with its factor. With `back`, their scales, the values are
 * written too: in FP32, or in BF16 by leaving out bits, all of which are 0. */
INLINE void encode_row(struct blocks b, size_t at, size_t n, const float *restrict factor,
                       const float *restrict back, int kind, int rule, int format, int is_known,
                       int is_random, int value_kind) {
    const void *restrict x = b.x;
    const uint8_t *restrict bytes = b.bytes;
    uint8_t *restrict payload = b.payload;
    size_t j = 0;
#if HAS_AVX512
#define ENCODE(SOME)                                                                               \
    do {                                                                                           \
        const __m512 v = load_512(x, at + j, kind, SOME),                                          \
                     f = _mm512_maskz_loadu_ps(SOME, factor + j);                                  \
        const __m128i drawn =                                                                      \
            is_random ? _mm_maskz_loadu_epi8(SOME, bytes + at + j) : _mm_setzero_si128();          \
        __m512 number;                                                                             \
        const __m128i code = rule == FP4 ? fp4_512(v, f, is_random, drawn, &number)                \
                                         : encode_512(v, f, format, &number);                      \
        _mm_mask_storeu_epi8(payload + at + j, SOME, code);                                        \
        if (value_kind == NONE) break;                                                             \
        number = _mm512_mul_ps(number, _mm512_maskz_loadu_ps(SOME, back + j));                     \
        const __m512i bits = _mm512_ternarylogic_epi32(INTEGERS(number), INTEGERS(v),              \
                                                       ALL_OF((int32_t)0x80000000u), 0xd8);        \
        if (value_kind == F32)                                                                     \
            _mm512_mask_storeu_epi32((int32_t *)b.values + at + j, SOME, bits);                    \
        else                                                                                       \
            _mm256_mask_storeu_epi16((uint16_t *)b.values + at + j, SOME,                          \
                                     _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));          \
    } while (0)
    if (is_known) {
        for (; j + 16 <= n; j += 16) ENCODE(0xffff);
        if (j < n) ENCODE((__mmask16)((1u << (n - j)) - 1));
        return;
    }
#undef ENCODE
#endif
#pragma GCC ivdep
    for (; j < n; j++) {
        const uint8_t byte = is_random ? bytes[at + j] : 0;
        payload[at + j] =
            block_code(load(x, at + j, kind), factor[j], rule, format, is_known, is_random, byte);
    }
}

#if HAS_AVX512
/* For factors that are powers of two the exponent, at its place in BF16, from which on a number times
 * its factor is a normal number of E4M3; any for blocks of zeros. Returns whether all are such powers,
 * and no number of E4M3 times such a scale leaves the normal range of BF16. */
INLINE int least_normals(const float *restrict factor, const int32_t *restrict amax, size_t num,
                         int16_t *restrict least) {
    int32_t is_other = 0;
    for (size_t j = 0; j < num; j++) {
        const int32_t bits = (int32_t)as_bits(factor[j]), is_zero = amax[j] == 0;
        const int32_t wrong =
            (bits & (int32_t)0x807fffff) | (bits < 9 << 23) | (bits > 244 << 23);
        is_other |= is_zero ? 0 : wrong;
        least[j] = (int16_t)(is_zero ? 1 << 7 : (248 << 7) - (bits >> 16));
    }
    return !is_other;
}

/* Codes in E4M3 of finite numbers in BF16, for factors by `least_normals`, one for each column or for
 * each `right` columns. Such a factor does not change which three bits of a mantissa are kept, so
 * that a normal number is rounded as it is, 32 at a time; the result is its value. */
INLINE void encode_powers(const struct blocks *b, size_t at, size_t n,
                          const int16_t *restrict least, size_t right) {
    for (size_t j = 0; j < n; j += 32) {
        const __mmask32 some = n - j < 32 ? ((__mmask32)1 << (n - j)) - 1 : ~(__mmask32)0;
        const __m512i x = _mm512_maskz_loadu_epi16(some, (const uint16_t *)b->x + at + j);
        const __m512i m = _mm512_and_si512(x, WORDS(0x7fff));
        const __m512i normal = right == 1 ? _mm512_maskz_loadu_epi16(some, least + j)
                                          : WORDS(least[j / right]);
        const __m512i one = WORDS(1);
        const __mmask32 is_small = _mm512_mask_cmplt_epu16_mask(
            some, _mm512_sub_epi16(m, one), _mm512_sub_epi16(normal, one)); /* zero is not */
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi16(m, 4), one);
        const __m512i up = _mm512_add_epi16(_mm512_add_epi16(m, WORDS(7)), odd);
        __m512i value = _mm512_and_si512(up, WORDS(0x7ff0));
        __m512i code = _mm512_srli_epi16(
            _mm512_subs_epu16(value, _mm512_sub_epi16(normal, WORDS(1 << 7))), 4);
        code = _mm512_ternarylogic_epi32(code, _mm512_srli_epi16(x, 8), WORDS(0x80), 0xd8);
        value = words_with_sign(value, x);
        __m256i codes = _mm512_cvtepi16_epi8(code);
        if (is_small) { /* a subnormal number of E4M3 */
            for (size_t half = 0; half < 2; half++) {
#define HALF(V) (half ? _mm512_extracti64x4_epi64(V, 1) : _mm512_castsi512_si256(V))
#define WIDE(V) _mm512_slli_epi32(_mm512_cvtepu16_epi32(HALF(V)), 16)
                const __m512 v = FLOATS(WIDE(x)), first = FLOATS(WIDE(normal));
                const __m512 scale = _mm512_mul_ps(first, _mm512_set1_ps(0x1p6f));
                __m512 number;
                const __m128i part =
                    encode_512(v, _mm512_div_ps(_mm512_set1_ps(1.0f), scale), E4M3, &number);
                const __m256i words = _mm512_cvtepi32_epi16(
                    _mm512_srli_epi32(INTEGERS(_mm512_mul_ps(number, scale)), 16));
                codes = half ? _mm256_inserti128_si256(codes, part, 1)
                             : _mm256_inserti128_si256(codes, part, 0);
                value = half ? _mm512_inserti64x4(value, words, 1)
                             : _mm512_inserti64x4(value, words, 0);
#undef WIDE
#undef HALF
            }
            value = words_with_sign(value, x);
        }
        _mm256_mask_storeu_epi8(b->payload + at + j, some, codes);
        if (b->values) _mm512_mask_storeu_epi16((uint16_t *)b->values + at + j, some, value);
    }
}

/* The same of a strip's rows from `top` to `bottom`. */
static __attribute__((noinline)) void encode_by_powers(const struct blocks *b, size_t top,
                                                       size_t bottom, size_t left, size_t n,
                                                       const int16_t *least) {
    for (size_t row = top; row < bottom; row++) {
        if (b->right == 1) encode_powers(b, row * b->cols + left, n, least, 1);
        else encode_powers(b, row * b->cols + left, n, least, b->right);
    }
}
#endif

/* The same of rows from `top` to `bottom`. With NaN or infinity, which is rare, one slow loop serves
 * all kinds and rules. */
static __attribute__((noinline)) void encode_strip(const struct blocks *from, size_t top,
                                                   size_t bottom, size_t left, size_t n,
                                                   const float *factor, const float *back,
                                                   int is_known) {
    const struct blocks b = *from;
#define ROWS(K, RULE, FORMAT, KNOWN, RANDOM, V)                                                    \
    for (size_t row = top; row < bottom; row++)                                                    \
    encode_row(b, row * b.cols + left, n, factor, back, K, RULE, FORMAT, KNOWN, RANDOM, V)
#define OF(K, V)                                                                                   \
    do {                                                                                           \
        if (b.rule == FP4 && b.bytes) ROWS(K, FP4, E4M3, 1, 1, V);                                 \
        else if (b.rule == FP4) ROWS(K, FP4, E4M3, 1, 0, V);                                       \
        else if (b.format == E4M3) ROWS(K, MX, E4M3, 1, 0, V);                                     \
        else ROWS(K, MX, E5M2, 1, 0, NONE);                                                        \
    } while (0)
    if (!is_known) ROWS(b.kind, b.rule, b.format, 0, b.bytes != NULL, NONE);
    else if (b.kind == F32 && back) OF(F32, F32);
    else if (b.kind == F32) OF(F32, NONE);
    else if (b.kind == BF16 && back && b.value_kind == F32) OF(BF16, F32);
    else if (b.kind == BF16 && back) OF(BF16, BF16);
    else if (b.kind == BF16) OF(BF16, NONE);
    else if (back) OF(F16, F32);
    else OF(F16, NONE);
#undef OF
#undef ROWS
}

/* Values of a strip's codes, by the scales of its blocks, the first of them `scale`. */
static __attribute__((noinline)) void value_strip(const uint8_t *payload, size_t top, size_t bottom,
                                                  size_t left, size_t n, size_t cols,
                                                  const float *scale, size_t right, void *out,
                                                  int out_kind) {
#define OF(RIGHT, K) value_rows(payload, top, bottom, left, n, cols, scale, RIGHT, out, K)
    if (right == 1 && out_kind == F32) OF(1, F32);
    else if (right == 1) OF(1, BF16);
    else if (right == 16 && out_kind == F32) OF(16, F32);
    else if (right == 16) OF(16, BF16);
    else if (right == 32 && out_kind == F32) OF(32, F32);
    else if (right == 32) OF(32, BF16);
    else if (out_kind == F32) OF(right, F32);
    else OF(right, BF16);
#undef OF
}

/* Whether the cast of a strip can write the values too. Each of its lines has `num` scales, and the
 * next line has its own after `each`: those between are of no block. */
INLINE int writes_values(const struct blocks *b, const float *restrict scales, size_t lines,
                         size_t each, size_t num, int is_known) {
    if (!HAS_AVX512 || !b->values || !is_known) return 0;
    if (b->value_kind == F32) return 1;
    if (b->kind != BF16) return 0; /* `encode_strip` has loops for BF16 to BF16 alone */
    if (num == each) return are_short(scales, lines * each);
    int all = 1;
    for (size_t line = 0; line < lines; line++) all &= are_short(scales + line * each, num);
    return all;
}

/* Cast `n` columns of a row of blocks, or with blocks of one row those of several rows, `right` at
 * most. `right` is a power of two. */
static void cast_strip(const struct blocks *b, size_t top, size_t bottom, size_t left, size_t n) {
    const size_t right = b->right, of_row = (b->cols + right - 1) / right, each = STRIP / right;
    const size_t lines = b->down == 1 ? bottom - top : 1, high = (bottom - top) / lines;
    int32_t amax[STRIP];
    float scales[STRIP], of_block[STRIP], factor[STRIP], back[STRIP];
    int is_known = 1;
    for (size_t line = 0; line < lines; line++)
        is_known &= find_amax(b, (top + line) * b->cols + left, high, n, 0, amax + line * each);
    if (b->rule != CURRENT && !is_known)
        for (size_t line = 0; line < lines; line++)
            find_amax(b, (top + line) * b->cols + left, high, n, 1, amax + line * each);
    find_factors(b, lines * each, amax, scales, of_block);
    const size_t num = (n + right - 1) / right;
#if HAS_AVX512
    int16_t least[STRIP];
    const int is_bf16 = b->kind == BF16 && (!b->values || b->value_kind == BF16);
    const int by_powers = is_known && is_bf16 && b->rule != FP4 && b->format == E4M3 &&
                          (right == 1 || right % 32 == 0) &&
                          least_normals(of_block, amax, lines * each, least);
#endif
    const int writes = writes_values(b, scales, lines, each, num, is_known);
    for (size_t line = 0; line < lines; line++) {
        const float *own = scales + line * each;
        const size_t first = top + line;
        memcpy(b->scale + first / b->down * of_row + left / right, own, num * sizeof *own);
#if HAS_AVX512
        if (by_powers) {
            encode_by_powers(b, first, first + high, left, n, least + line * each);
            continue;
        }
#endif
        widen(of_block + line * each, right, factor);
        if (writes) widen(own, right, back);
        encode_strip(b, first, first + high, left, n, factor, writes ? back : NULL, is_known);
        if (b->values && !writes)
            value_strip(b->payload, first, first + high, left, n, b->cols, own, right, b->values,
                        b->value_kind);
    }
}

/* A row's block of any length, of current scaling. */
static void cast_line(const struct blocks *b, size_t row, size_t left, size_t n, float *scale) {
    const void *restrict x = b->x;
    const size_t at = row * b->cols + left, filled = n < STRIP ? n : STRIP;
    float factor[STRIP], back[STRIP];
    int32_t amax = 0;
#define LOOK(K)                                                                                    \
    for (size_t i = at; i < at + n; i++) {                                                         \
        int32_t seen = (int32_t)(as_bits(load(x, i, K)) & 0x7fffffffu);                            \
        amax = seen > amax ? seen : amax;                                                          \
    }
    if (b->kind == F32) LOOK(F32)
    else if (b->kind == BF16) LOOK(BF16)
    else LOOK(F16)
#undef LOOK
    const float one = factor_of(amax, *b, CURRENT, b->format, scale), number = *scale;
    const int is_known = amax < 0x7f800000, writes = writes_values(b, scale, 1, 1, 1, is_known);
    for (size_t j = 0; j < filled; j++) factor[j] = one, back[j] = number;
    for (size_t done = 0; done < n; done += STRIP) {
        const size_t here = n - done < STRIP ? n - done : STRIP;
        encode_strip(b, row, row + 1, left + done, here, factor, writes ? back : NULL, is_known);
        if (b->values && !writes)
            value_strip(b->payload, row, row + 1, left + done, here, b->cols, scale, b->right,
                        b->values, b->value_kind);
    }
}

static void cast_blocks(const struct blocks *b, int threads) {
    if (!b->rows || !b->cols) return; /* a row's block has no elements then, to divide by */
    const int is_line = b->rule == CURRENT && b->down == 1;
    const size_t step = is_line ? b->right : STRIP, per = (b->cols + step - 1) / step;
    const size_t high = is_line ? 1 : b->down == 1 ? b->right : b->down;
    const size_t tiles = (b->rows + high - 1) / high * per;
    if (b->rows * b->cols < SERIAL_BELOW) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (size_t tile = 0; tile < tiles; tile++) {
        const size_t top = tile / per * high, left = tile % per * step;
        const size_t bottom = top + high < b->rows ? top + high : b->rows;
        const size_t n = b->cols - left < step ? b->cols - left : step;
        if (is_line) cast_line(b, top, left, n, b->scale + tile);
        else cast_strip(b, top, bottom, left, n);
    }
}

/* MXFP8 of x [rows, cols]: blocks of 32 along rows, or along columns. */
void megafp8_mxfp8(const void *x, size_t rows, size_t cols, int kind, int along_columns,
                   uint8_t *payload, float *scale, void *values, int value_kind, int threads) {
    const size_t down = along_columns ? 32 : 1, right = along_columns ? 1 : 32;
    const struct blocks b = {.x = x, .rows = rows, .cols = cols, .down = down, .right = right,
                             .kind = kind, .rule = MX, .format = E4M3,
                             .payload = payload, .scale = scale,
                             .values = values, .value_kind = value_kind};
    cast_blocks(&b, threads);
}

/* FP8 by blocks of `down` x `right`, of which one is 1, or `right` divides STRIP. */
void megafp8_current(const void *x, size_t rows, size_t cols, int kind, size_t down, size_t right,
                     int format, int power_2, int torchao, uint8_t *payload, float *scale,
                     void *values, int value_kind, int threads) {
    const struct blocks b = {.x = x, .rows = rows, .cols = cols, .down = down, .right = right,
                             .kind = kind, .rule = CURRENT, .format = format,
                             .payload = payload, .scale = scale,
                             .values = values, .value_kind = value_kind,
                             .power_2 = power_2, .torchao = torchao};
    cast_blocks(&b, threads);
}

/* NVFP4 of a tensor with this amax, by blocks of 1 x 16, 16 x 1 or 16 x 16, which divide the sizes;
 * `outer` is the factor from number times scale to value. */
void megafp8_nvfp4(const void *x, size_t rows, size_t cols, int kind, size_t down, size_t right,
                   const float *amax, const uint8_t *bytes, uint8_t *payload, float *scale,
                   void *values, int value_kind, float *outer, int threads) {
    /* The factor brings the amax to the largest number times the largest scale. */
    const float factor = at_most_largest(2688.0f / *amax);
    const float encoding = *amax == 0.0f || factor == 0.0f ? 1.0f : factor;
    const struct blocks b = {.x = x, .rows = rows, .cols = cols, .down = down, .right = right,
                             .kind = kind, .rule = FP4, .format = E4M3,
                             .payload = payload, .scale = scale,
                             .values = values, .value_kind = value_kind,
                             .encoding = encoding, .bytes = bytes};
    *outer = *amax / 2688.0f;
    cast_blocks(&b, threads);
}

/* The values of numbers in E4M3 [rows, cols], with a scale for each `down` x `right` of them. */
void megafp8_block_values(const uint8_t *payload, size_t rows, size_t cols, const float *scale,
                          size_t down, size_t right, void *out, int out_kind, int threads) {
    if (!rows || !cols) return;
    const size_t of_row = (cols + right - 1) / right, per = (cols + STRIP - 1) / STRIP;
    const size_t tiles = (rows + down - 1) / down * per;
    if (rows * cols < SERIAL_BELOW) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (size_t tile = 0; tile < tiles; tile++) {
        const size_t top = tile / per * down, left = tile % per * STRIP;
        const size_t bottom = top + down < rows ? top + down : rows;
        const size_t n = cols - left < STRIP ? cols - left : STRIP;
        const float *from = scale + top / down * of_row + left / right;
        value_strip(payload, top, bottom, left, n, cols, from, right, out, out_kind);
    }
}

#define TURNED 16 /* columns that are rotated together */

#if HAS_AVX512
/* `rotate_strip` of BF16 in sums of 32-bit integers, which are exact too: each column is multiplied by
 * a power of two that makes all its numbers integers, and leaves room for sums of 16. Returns 0, and
 * writes nothing, where a column's numbers lie too far from each other for that. */
INLINE int rotate_integers(const void *restrict x, size_t at, size_t rows, size_t cols,
                           __mmask16 some, const float *restrict signs, uint16_t *restrict out,
                           int16_t *restrict amax) {
    const int room = 26; /* the bits that a column's largest number has as an integer, less one */
    __m512 number[FP4_BLOCK];
    __m512i v[FP4_BLOCK], most = ALL_OF(0), least = ALL_OF(-1);
    for (size_t i = 0; i < FP4_BLOCK; i++) {
        number[i] = load_512(x, at + i * cols, BF16, i < rows ? some : 0);
        const __m512i m = INTEGERS(magnitude_512(number[i]));
        most = _mm512_max_epi32(most, m);
        least = _mm512_min_epu32(least, _mm512_sub_epi32(m, ALL_OF(1))); /* zero is the largest */
    }
    const __m512i e = _mm512_max_epi32(_mm512_srli_epi32(most, 23), ALL_OF(29));
    const __m512i far = _mm512_sub_epi32(e, _mm512_srli_epi32(least, 23));
    if (_mm512_cmpgt_epi32_mask(far, ALL_OF(room - 7)) | _mm512_cmpgt_epi32_mask(e, ALL_OF(254)))
        return 0;
    const __m512 there = FLOATS(_mm512_slli_epi32(_mm512_sub_epi32(ALL_OF(254 + room), e), 23));
    const __m512 back = FLOATS(_mm512_slli_epi32(_mm512_sub_epi32(e, ALL_OF(room + 2)), 23));
    for (size_t i = 0; i < FP4_BLOCK; i++)
        v[i] = _mm512_cvtps_epi32(
            _mm512_mul_ps(number[i], _mm512_mul_ps(there, _mm512_set1_ps(signs[i]))));
#pragma GCC unroll 4
    for (size_t half = 1; half < FP4_BLOCK; half *= 2)
#pragma GCC unroll 16
        for (size_t i = 0; i < FP4_BLOCK; i++) {
            if (i & half) continue;
            const __m512i a = v[i], b = v[i + half];
            v[i] = _mm512_add_epi32(a, b);
            v[i + half] = _mm512_sub_epi32(a, b);
        }
    __m512i seen = ALL_OF(0);
    for (size_t i = 0; i < FP4_BLOCK; i++) {
        const __m512i bits = INTEGERS(_mm512_mul_ps(_mm512_cvtepi32_ps(v[i]), back));
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), ALL_OF(1));
        const __m512i code = _mm512_srli_epi32(
            _mm512_add_epi32(bits, _mm512_add_epi32(odd, ALL_OF(0x7fff))), 16);
        seen = _mm512_max_epi32(seen, _mm512_and_si512(code, ALL_OF(0x7fff)));
        _mm256_mask_storeu_epi16(out + at + i * cols, some, _mm512_cvtepi32_epi16(code));
    }
    const __m256i before = _mm256_loadu_si256((const __m256i *)amax);
    _mm256_storeu_si256((__m256i *)amax, _mm256_max_epi16(before, _mm512_cvtepi32_epi16(seen)));
    return 1;
}
#endif

/* Each 16 elements of a column of x [rows, cols] times diag(signs) H / 4, in BF16. The sums are in
 * FP64, exact unless a column's numbers lie farther apart than its bits; a sum of zeros is +0. Rows that lack to 16 are zeros.
 * `amax` is raised by the magnitudes of the result, as bits of BF16. */
INLINE void rotate_strip(const void *restrict x, size_t top, size_t rows, size_t cols, int kind,
                         const float *restrict signs, int are_signs, uint16_t *restrict out,
                         int16_t *restrict amax) {
    double v[FP4_BLOCK][TURNED];
    for (size_t left = 0; left < cols; left += TURNED) {
        const size_t n = cols - left < TURNED ? cols - left : TURNED;
#if HAS_AVX512
        if (kind == BF16 && are_signs &&
            rotate_integers(x, top * cols + left, rows - top, cols, (__mmask16)((1u << n) - 1),
                            signs, out, amax))
            continue;
#endif
        for (size_t i = 0; i < FP4_BLOCK; i++)
            for (size_t j = 0; j < n; j++) {
                const size_t at = (top + i) * cols + left + j;
                v[i][j] = top + i < rows ? (double)(load(x, at, kind) * signs[i]) : 0.0;
            }
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
            for (size_t j = 0; j < n; j++) {
                const uint16_t code = to_bf16((float)(v[i][j] * 0.25 + 0.0));
                const int16_t seen = code & 0x7fff;
                out[(top + i) * cols + left + j] = code;
                amax[j] = seen > amax[j] ? seen : amax[j];
            }
    }
}

/* `out` has whole 16s of rows. `amax` becomes the largest magnitude of the result, or infinity if it
 * has a NaN. */
void megafp8_rotate(const void *x, size_t rows, size_t cols, int kind, const float *signs,
                    uint16_t *out, float *amax, int threads) {
    int32_t all = 0;
    int are_signs = 1;
    for (size_t i = 0; i < FP4_BLOCK; i++) are_signs &= signs[i] == 1.0f || signs[i] == -1.0f;
    if (rows * cols < SERIAL_BELOW) threads = 1;
#pragma omp parallel for num_threads(threads) reduction(max : all) schedule(static, 1)
    for (int t = 0; t < threads; t++) {
        int16_t seen[TURNED] = {0};
        size_t begin, end;
        share(rows, threads, t, &begin, &end);
        for (; begin < end; begin += FP4_BLOCK) {
            if (kind == F32) rotate_strip(x, begin, rows, cols, F32, signs, are_signs, out, seen);
            else if (kind == BF16) rotate_strip(x, begin, rows, cols, BF16, signs, are_signs, out, seen);
            else rotate_strip(x, begin, rows, cols, F16, signs, are_signs, out, seen);
        }
        for (size_t j = 0; j < TURNED; j++) all = seen[j] > all ? seen[j] : all;
    }
    *amax = 0.0f;
    store_amax(amax, all << 16);
}
