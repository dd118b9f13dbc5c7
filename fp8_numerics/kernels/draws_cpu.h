/* Random bytes by a counter: Philox 4x32 in ten rounds (Salmon et al., SC 2011, table 2).
 *
 * The 16 bytes of one counter belong to 16 columns that follow each other. The bytes are those of
 * philox.py.
 */
#include "elements_cpu.h"

#define DRAW_LANES 64 /* counters that are computed together */
#define DRAW_BYTES 16 /* of one counter */

/* Bytes of `lanes` counters (first + lane, position, sample); `key` has two words. */
INLINE void draw_lanes(uint32_t first, size_t lanes, uint32_t position, uint64_t sample,
                       const uint32_t *key, uint32_t (*out)[4]) {
    uint32_t a[DRAW_LANES], b[DRAW_LANES], c[DRAW_LANES], d[DRAW_LANES];
    uint32_t k0 = key[0], k1 = key[1];
    for (size_t i = 0; i < DRAW_LANES; i++) {
        a[i] = first + (uint32_t)i;
        b[i] = position;
        c[i] = (uint32_t)sample;
        d[i] = (uint32_t)(sample >> 32);
    }
    for (int round = 0; round < 10; round++) {
        for (size_t i = 0; i < DRAW_LANES; i++) {
            const uint64_t p = (uint64_t)0xD2511F53u * a[i], q = (uint64_t)0xCD9E8D57u * c[i];
            a[i] = (uint32_t)(q >> 32) ^ b[i] ^ k0;
            c[i] = (uint32_t)(p >> 32) ^ d[i] ^ k1;
            b[i] = (uint32_t)q;
            d[i] = (uint32_t)p;
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    for (size_t i = 0; i < lanes; i++) {
        out[i][0] = a[i];
        out[i][1] = b[i];
        out[i][2] = c[i];
        out[i][3] = d[i];
    }
}

/* The bytes of columns `begin` to `end` of one row. */
INLINE void draw_row(size_t begin, size_t end, uint32_t position, uint64_t sample,
                     const uint32_t *key, uint8_t *out) {
    uint32_t words[DRAW_LANES][4];
    const size_t last = (end + DRAW_BYTES - 1) / DRAW_BYTES;
    for (size_t block = begin / DRAW_BYTES; block < last; block += DRAW_LANES) {
        const size_t lanes = last - block < DRAW_LANES ? last - block : DRAW_LANES;
        draw_lanes((uint32_t)block, lanes, position, sample, key, words);
        size_t from = block * DRAW_BYTES, to = (block + lanes) * DRAW_BYTES;
        from = from < begin ? begin : from;
        to = to > end ? end : to;
        memcpy(out + (from - begin), (uint8_t *)words + (from - block * DRAW_BYTES), to - from);
    }
}

/* One byte for each element of `out` [rows, cols]. A row is a position of a sample; the columns are
 * those of `ranges`, pairs of begin and end whose lengths add up to `cols`. */
void megafp8_draw(const int64_t *samples, const int64_t *positions, size_t rows,
                  const int64_t *ranges, size_t num_ranges, size_t cols, const uint32_t *key,
                  uint8_t *out, int threads) {
    if (rows * cols < SERIAL_BELOW) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int t = 0; t < threads; t++) {
        size_t first, last;
        share(rows, threads, t, &first, &last);
        for (size_t row = first; row < last; row++) {
            uint8_t *to = out + row * cols;
            for (size_t i = 0; i < num_ranges; i++) {
                const size_t begin = (size_t)ranges[2 * i], end = (size_t)ranges[2 * i + 1];
                draw_row(begin, end, (uint32_t)positions[row], (uint64_t)samples[row], key, to);
                to += end - begin;
            }
        }
    }
}
