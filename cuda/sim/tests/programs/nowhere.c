// Copies to the host where nothing can be written, or sends itself the signal of such a fault.
#include "program.h"
#include <signal.h>
#include <unistd.h>

int main(int count, char **arguments) {
    begin(count, arguments);
    alarm(60);
    if (count > 1 && !strcmp(arguments[1], "sent")) return raise(SIGSEGV);
    CK(cuMemcpyDtoH((char *)"constant", device(), 8));
    return end();
}
