/* hooked.c - a program in C that calls the hooks, without Python and torch. */
#include <stdio.h>
#include <swapkit.h>

int main(void) {
    char memory[16] = {0};
    sk_op_begin("kernel");
    int failed = sk_op_tensor(memory, sizeof memory, NULL) != SK_OP_OK;
    sk_op_post();
    sk_op_end();
    printf("%d %zu\n", failed, sk_op_depth());
    return 0;
}
