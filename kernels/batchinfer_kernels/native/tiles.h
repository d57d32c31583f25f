/* Products of bytes in AMX's tiles: registers of 16 rows of 64 bytes, sixteen of whose products are one instruction.
 *
 * They give the very integers that fours of bytes in 512-bit registers give (`dot_fours`), and so every number that is
 * computed from them stays the same, bit by bit, on processors without them.
 */

#ifndef BATCHINFER_TILES_H
#define BATCHINFER_TILES_H

#include <immintrin.h>
#include <stdint.h>

/* A tile. */
enum { TILE_ROWS = 16, TILE_BYTES = 64 };

#ifdef __AMX_INT8__
/* Whether the processor has tiles and the operating system lets this process use them. */
extern int batchinfer_tiles;

/* Rows and bytes of a row of each of the eight tiles, as the instruction takes them. */
struct tile_shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} __attribute__((packed, aligned(64)));

/* What the compiler keeps in registers is written before a tile is loaded of it, and nothing before it that is written
 * there later: the instruction's own memory is not known to it. */
#define WRITTEN() __asm__ volatile("" ::: "memory")

/* A thread's tiles, from the first of these to the last: eight whole ones. */
static inline void begin_tiles(void)
{
    static const struct tile_shapes shapes = {
        .palette = 1,
        .bytes = {TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES},
        .rows = {TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS},
    };
    if (batchinfer_tiles)
        _tile_loadconfig(&shapes);
}

static inline void end_tiles(void)
{
    if (batchinfer_tiles)
        _tile_release();
}
#else
enum { batchinfer_tiles = 0 };
static inline void begin_tiles(void) {}
static inline void end_tiles(void) {}
#endif

#endif
