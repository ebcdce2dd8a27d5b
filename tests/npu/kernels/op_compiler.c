/* libacl_op_compiler.so: settings of the compiler of operators, which torch_npu looks up by name.
 * There is nothing to compile. Any thread may call these; each holds the one lock for a moment. */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "acl/acl.h"
#include "acl/acl_op_compiler.h"

#define SETTINGS 16
#define LENGTH 64

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int64_t parameters[SETTINGS];
/* Atlas A2 and later do not compile operators while a program runs, unless they are told to. */
static char options[SETTINGS][LENGTH] = {[ACL_OP_JIT_COMPILE] = "disable"};

aclError aclSetCompileopt(aclCompileOpt option, const char *value) {
    if (option >= SETTINGS || value == NULL || strlen(value) >= LENGTH) {
        return ACL_ERROR_INVALID_PARAM;
    }
    pthread_mutex_lock(&lock);
    strcpy(options[option], value);
    pthread_mutex_unlock(&lock);
    return ACL_SUCCESS;
}

size_t aclGetCompileoptSize(aclCompileOpt option) {
    (void)option;
    return LENGTH;
}

aclError aclGetCompileopt(aclCompileOpt option, char *value, size_t length) {
    if (option >= SETTINGS || value == NULL || length < LENGTH) {
        return ACL_ERROR_INVALID_PARAM;
    }
    pthread_mutex_lock(&lock);
    strcpy(value, options[option]);
    pthread_mutex_unlock(&lock);
    return ACL_SUCCESS;
}

aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
    if ((unsigned)option >= SETTINGS) {
        return ACL_ERROR_INVALID_PARAM;
    }
    pthread_mutex_lock(&lock);
    parameters[option] = value;
    pthread_mutex_unlock(&lock);
    return ACL_SUCCESS;
}

aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t *value) {
    if ((unsigned)option >= SETTINGS) {
        return ACL_ERROR_INVALID_PARAM;
    }
    pthread_mutex_lock(&lock);
    *value = parameters[option];
    pthread_mutex_unlock(&lock);
    return ACL_SUCCESS;
}

aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) {
    return aclrtSetSysParamOpt(option, value);
}

aclError aclrtCtxGetSysParamOpt(aclSysParamOpt option, int64_t *value) {
    return aclrtGetSysParamOpt(option, value);
}
