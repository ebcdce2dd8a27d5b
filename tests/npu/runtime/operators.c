/* operators.c - operators that are compiled at run time: there are none. */
#include <stdio.h>

#include "runtime.h"

aclError aclopCompileAndExecute(const char *name, int input_count,
                                const aclTensorDesc *const input_descs[],
                                const aclDataBuffer *const inputs[], int output_count,
                                const aclTensorDesc *const output_descs[],
                                aclDataBuffer *const outputs[], const aclopAttr *attributes,
                                aclopEngineType engine, aclopCompileType compile, const char *path,
                                aclrtStream stream) {
    ACL_ENTER(aclopCompileAndExecute);
    (void)input_count, (void)input_descs, (void)inputs, (void)output_count, (void)output_descs;
    (void)outputs, (void)attributes, (void)engine, (void)compile, (void)path, (void)stream;
    (void)fprintf(stderr, "simulated ACL: there is no operator %s\n", name);
    return acl_fail(ACL_ERROR_OP_NOT_FOUND, "aclopCompileAndExecute: no operator %s", name);
}
