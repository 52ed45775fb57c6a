// Calls when a thread's local data are gone: in the destructor of a key, and in an exit handler. Both use a page that a copy
// uses in part.
#include "program.h"
#include <pthread.h>
#include <unistd.h>

static CUstream on;
static CUdeviceptr memory;
static char *slot;

static void use(void) {
    CK(cuCtxSetCurrent(context));
    CK(cuMemcpyHtoDAsync(memory, slot, 8, on));
    slot[8]++;
    CUgraph graph;
    CUstream captured = stream();
    CK(cuStreamBeginCapture(captured, CU_STREAM_CAPTURE_MODE_GLOBAL));
    CK(cuMemsetD8Async(memory, 1, BYTES, captured));
    CK(cuStreamEndCapture(captured, &graph));
    CK(cuStreamDestroy(captured));
    CK(cuStreamSynchronize(on));
}
static void destructor(void *value) {
    (void)value;
    use();
}
static void *thread(void *key) {
    pthread_setspecific(*(pthread_key_t *)key, key);
    use();
    return NULL;
}
static void handler(void) {
    use();
    CK(cuMemFreeHost(slot));
    CK(cuMemFree(memory));
    CK(cuStreamDestroy(on));
    _exit(end() || right);
}

int main(int count, char **arguments) {
    pthread_key_t key;
    pthread_t other;
    atexit(handler);
    begin(count, arguments);
    on = stream(), memory = device(), slot = pinned();
    use();
    if (pthread_key_create(&key, destructor) || pthread_create(&other, NULL, thread, &key)) return 4;
    pthread_join(other, NULL);
    return 0;
}
