// The default stream is taken to be ordered with every other. It is not with streams that are non-blocking.
#include "../program.h"

int main(int count, char **arguments) {
    begin(count, arguments);
    CUstream work;
    CK(cuStreamCreate(&work, right ? 0 : CU_STREAM_NON_BLOCKING));
    char *slot = pinned();
    CUdeviceptr batch_at = device(), result = device();
    for (int batch = 0; batch < BATCHES; batch++) {
        memset(slot, batch, BYTES);
        upload(batch_at, slot, NULL);
        compute(result, batch_at, work);
        CK(cuStreamSynchronize(NULL));
    }
    return end();
}
