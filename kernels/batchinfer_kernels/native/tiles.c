/* Whether tiles are used: library.py asks when the library is loaded. */

#define _GNU_SOURCE /* syscall */

#include "tiles.h"

#ifdef __AMX_INT8__
#include <sys/syscall.h>
#include <unistd.h>

int batchinfer_tiles = 0;

enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 }; /* of arch_prctl, Linux 5.16 */

/* Uses tiles from now on if `wanted` and if Linux permits it: their registers are large, and only who asks has them
 * saved. Returns whether they are used. To be called while no other thread is computing. */
int batchinfer_use_tiles(int wanted)
{
    batchinfer_tiles = wanted && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return batchinfer_tiles;
}
#else
int batchinfer_use_tiles(int wanted)
{
    (void)wanted;
    return 0;
}
#endif
