/* settings.c - the environment, read in one place. */
#include "settings.h"

#include <stdio.h>
#include <stdlib.h>

typedef struct named_setting {
    const char *name, *usual;
} named_setting;

#define NAMED(name, usual) {"CUSIM_" #name, usual},
static const named_setting table[] = {SIM_SETTINGS(NAMED)};

static const char *read_variable(const char *name) {
    const char *text = getenv(name); /* NOLINT(concurrency-mt-unsafe) */
    return text == NULL || *text == '\0' ? NULL : text;
}

const char *sim_setting_text(sim_setting setting) {
    const char *text = read_variable(table[setting].name);
    return text != NULL ? text : table[setting].usual;
}

static void complain(const char *name, const char *text) {
    (void)fprintf(stderr, "cusim: %s=%s is not a number\n", name, text);
}

/* True: `text` was a number with an optional suffix. */
static bool number_of(const char *text, uint64_t *out) {
    char *end = NULL;
    uint64_t value = strtoull(text, &end, 0);
    unsigned shift = *end == 'K' ? 10 : *end == 'M' ? 20 : *end == 'G' ? 30 : 0;
    *out = value << shift;
    return end != text && (*end == '\0' || (shift > 0 && end[1] == '\0'));
}

uint64_t sim_setting_number(sim_setting setting, uint64_t otherwise) {
    const named_setting *named = &table[setting];
    const char *text = read_variable(named->name);
    uint64_t value = otherwise;
    if (text != NULL && number_of(text, &value)) {
        return value;
    }
    if (text != NULL) {
        complain(named->name, text);
    }
    return named->usual != NULL && number_of(named->usual, &value) ? value : otherwise;
}

static double fraction_of(const char *name, double otherwise) {
    const char *text = read_variable(name);
    if (text == NULL) {
        return otherwise;
    }
    char *end = NULL;
    double value = strtod(text, &end);
    if (*end != '\0') {
        complain(name, text);
        return otherwise;
    }
    return value;
}

double sim_setting_fraction(sim_setting setting) {
    return fraction_of(table[setting].name, strtod(table[setting].usual, NULL));
}

double sim_setting_rate(const char *name, double otherwise) {
    char variable[64];
    (void)snprintf(variable, sizeof variable, "CUSIM_%s", name);
    return fraction_of(variable, otherwise);
}
