// Page-locked memory is freed, or goes back to the program's pool, while the copy still reads it.
#include "../program.h"

int main(int count, char **arguments) {
    begin(count, arguments);
    CUstream copy = stream();
    CUdeviceptr weights = device();
    for (int layer = 0; layer < BATCHES; layer++) {
        char *staging = pinned();
        memset(staging, layer, BYTES);
        upload(weights, staging, copy);
        if (right) CK(cuStreamSynchronize(copy));
        CK(cuMemFreeHost(staging));
    }
    return end();
}
