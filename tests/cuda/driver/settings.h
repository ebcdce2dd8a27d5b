/* settings.h - the variables of the environment that make the simulated machine.
 *
 * One table for all of the simulation: nothing else here reads the environment, but for the rates
 * of the virtual GPU, each of which is CUSIM_<its name in rates.c>.
 */
#ifndef CUSIM_SETTINGS_H
#define CUSIM_SETTINGS_H

#include <stdbool.h>
#include <stdint.h>

/* The variable is CUSIM_<name>; a number may end in K, M or G. NULL: what holds is said behind it.
 */
#define SIM_SETTINGS(X)                                                                            \
    X(DEVICES, "1")                                                                                \
    X(CAPACITY, NULL) /* 1G; that of the machine on the virtual GPU */                             \
    X(GRANULARITY, "2M")                                                                           \
    X(BYTES_PER_S, "0")                                                                            \
    X(LATENCY_NS, "0")                                                                             \
    X(DELAY_NS, "0")                                                                               \
    X(WIPE, NULL) /* 1; 0 on the virtual GPU */                                                    \
    X(VMM, "1")                                                                                    \
    X(PEERS, "1")                                                                                  \
    X(REUSE, "0")                                                                                  \
    X(LOG, "0")                                                                                    \
    X(SOC, "Ascend910B3")  /* what the simulated ACL runtime says of itself */                     \
    X(CANN, "8.1.RC1")     /* likewise, its version */                                             \
    X(DEVICE_OOM, "0")     /* 1: its error for memory that does not fit is 207018, not 207001 */   \
    X(STRICT_EXIT, "0")    /* 1 prints the driver calls that the process makes while it exits */   \
    X(TIMED, "0")          /* 1: the virtual GPU, on which work only takes time */                 \
    X(MACHINE, "H100")     /* which one: a column of rates.c */                                    \
    X(HOST_MEMORY, "400G") /* how much the virtual GPU's host seems to have */                     \
    X(HOST_SLOWNESS, "1")  /* how much longer its host takes than this one at a quiet moment */    \
    X(HOST_QUIET_NS, "0")  /* what speed.c's sample takes at a quiet moment; 0: it is measured */  \
    X(HOST_QUIET_FILE, "") /* where the least that was measured so far is kept */

typedef enum sim_setting {
#define SIM_SETTING(name, usual) SIM_SET_##name,
    SIM_SETTINGS(SIM_SETTING)
#undef SIM_SETTING
} sim_setting;

/* What the environment says, or what holds without it; NULL if the table says that. */
const char *sim_setting_text(sim_setting setting);
/* The same as a number; `otherwise` if there is none. */
uint64_t sim_setting_number(sim_setting setting, uint64_t otherwise);
double sim_setting_fraction(sim_setting setting);
/* CUSIM_<name> as a number, or `otherwise`. */
double sim_setting_rate(const char *name, double otherwise);

#endif
