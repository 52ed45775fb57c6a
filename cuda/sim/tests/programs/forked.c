// Children read and write page-locked memory that a copy of their parent uses. They end with a fault that is not the guard's.
#include "program.h"
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

int main(int count, char **arguments) {
    begin(count, arguments);
    CUstream on = stream();
    CUdeviceptr memory = device();
    char *slot = pinned();
    for (int i = 0; i < 20; i++) {
        int ended;
        download(slot, memory, on);
        pid_t child = fork();
        if (!child) {
            for (int at = 0; at < BYTES; at++) slot[at] += 1;
            *(volatile char *)"constant" = 1;
            _exit(0);
        }
        waitpid(child, &ended, 0);
        if (!WIFSIGNALED(ended) || WTERMSIG(ended) != SIGSEGV) return 4;
        CK(cuStreamSynchronize(on));
    }
    return end();
}
