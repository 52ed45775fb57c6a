// Page-locked memory is freed while the copy may still read it.
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
