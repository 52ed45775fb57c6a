// Copies every second page of page-locked tables, and waits once: the guard closes more ranges of pages than a process may have
// mappings.
#include "program.h"

enum { TABLES = 600, ROWS = 60, ROW = 8192, USED = 256 };

int main(int count, char **arguments) {
    begin(count, arguments);
    CUstream on = stream();
    CUdeviceptr memory = device();
    char *tables[TABLES];
    for (int table = 0; table < TABLES; table++) {
        CK(cuMemAllocHost((void **)&tables[table], (size_t)ROWS * ROW));
        for (int row = 0; row < ROWS; row++)
            CK(cuMemcpyHtoDAsync(memory, tables[table] + (size_t)row * ROW, USED, on));
    }
    CK(cuStreamSynchronize(on));
    for (int table = 0; table < TABLES; table++)
        for (int row = 0; row < ROWS; row++) tables[table][(size_t)row * ROW] = 1;
    return end();
}
