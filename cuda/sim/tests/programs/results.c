// Calls put results beside the bytes that a copy uses, as a program does that keeps the state of a slot in its memory; so does
// a handler of a signal, at any time, and another slot's too. With an argument, the program races with the copy.
#include "program.h"
#include <signal.h>
#include <sys/time.h>

CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end);

static struct {
    float milliseconds;
    CUdeviceptr more;
    volatile int alarms;
    char bytes[1000];
} *slot, *other;

static void alarmed(int number) {
    (void)number;
    slot->alarms++;
    other->alarms++;
}
static void every(int microseconds) {
    struct itimerval interval = {{0, microseconds}, {0, microseconds}};
    setitimer(ITIMER_REAL, &interval, NULL);
}

int main(int count, char **arguments) {
    begin(count, arguments);
    CUstream on = stream();
    CUdeviceptr memory = device();
    CUevent start, stop;
    CK(cuEventCreate(&start, 0));
    CK(cuEventCreate(&stop, 0));
    CK(cuEventRecord(start, on));
    CK(cuEventRecord(stop, on));
    slot = (void *)pinned();
    other = (void *)pinned();
    slot->alarms = other->alarms = 0;
    signal(SIGALRM, alarmed);
    every(1000);
    for (int batch = 0; batch < BATCHES || slot->alarms < 20; batch++) {
        CK(cuStreamSynchronize(on));
        memset(slot->bytes, batch, sizeof slot->bytes);
        slot->milliseconds = -1;
        CK(cuMemcpyHtoDAsync(memory, slot->bytes, sizeof slot->bytes, on));
        CK(cuMemcpyHtoDAsync(memory, other->bytes, sizeof other->bytes, on));
        CK(cuEventElapsedTime(&slot->milliseconds, start, stop));
        CK(cuMemAlloc(&slot->more, 64));
        if (slot->milliseconds < 0 || !slot->more) return 4;
        CK(cuMemFree(slot->more));
    }
    every(0);
    upload(memory, (char *)slot, on);
    if (count > 1) slot->bytes[7] = 1;
    return end();
}
