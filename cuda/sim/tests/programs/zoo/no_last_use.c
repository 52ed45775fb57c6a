// The copy does not wait for one use of a device slot, that of an evaluation on a second stream: it overwrites what the
// kernel may still read.
#include "../program.h"

int main(int count, char **arguments) {
    begin(count, arguments);
    CUstream copy = stream(), train = stream(), evaluate = stream();
    CUevent copied = event(), trained = event(), evaluated = event();
    char *slots[2] = {pinned(), pinned()};
    CUdeviceptr batch_at = device(), result = device(), metric = device();
    for (int batch = 0; batch < BATCHES; batch++) {
        CK(cuStreamSynchronize(copy));
        memset(slots[batch % 2], batch, BYTES);
        after(copy, trained);
        if (right) after(copy, evaluated);
        upload(batch_at, slots[batch % 2], copy);
        CK(cuEventRecord(copied, copy));
        after(train, copied);
        after(evaluate, copied);
        compute(result, batch_at, train);
        CK(cuEventRecord(trained, train));
        compute(metric, batch_at, evaluate);
        CK(cuEventRecord(evaluated, evaluate));
    }
    return end();
}
