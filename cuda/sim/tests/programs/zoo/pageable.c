// A copy of pageable memory is taken for one that is done when it returns. It is staged then, and may not have arrived.
#include "../program.h"

int main(int count, char **arguments) {
    begin(count, arguments);
    CUstream work = stream();
    char *weights = malloc(BYTES);
    CUdeviceptr weights_at = device(), result = device();
    for (int layer = 0; layer < BATCHES; layer++) {
        memset(weights, layer, BYTES);
        CK(cuMemcpyHtoD(weights_at, weights, BYTES));
        if (right) CK(cuStreamSynchronize(NULL));
        compute(result, weights_at, work);
        CK(cuStreamSynchronize(work));
    }
    free(weights);
    return end();
}
