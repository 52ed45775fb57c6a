// Copies to the host where nothing can be written.
#include "program.h"
#include <unistd.h>

int main(int count, char **arguments) {
    begin(count, arguments);
    alarm(60);
    CK(cuMemcpyDtoH((char *)"constant", device(), 8));
    return end();
}
