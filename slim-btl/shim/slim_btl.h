/* The component's parts: the shim, which knows Open MPI's structs, and libslim_btl.a, which does the work. */
#ifndef SLIM_BTL_H
#define SLIM_BTL_H

#include "opal_config.h"

#include "opal/constants.h"
#include "opal/class/opal_bitmap.h"
#include "opal/datatype/opal_convertor.h"
#include "opal/mca/btl/base/base.h"
#include "opal/mca/btl/btl.h"
#include "opal/runtime/opal_progress.h"
#include "opal/util/output.h"
#include "opal/util/proc.h"

#include <stddef.h>
#include <stdint.h>

/* Open MPI 5.0 and 4.1 differ in the exchange (modex), in receive callbacks, and in what follows the loss of a peer. */
#if BTL_VERSION >= 330
#define SLIM_BTL_OPEN_MPI_5 1
#include "opal/mca/pmix/pmix-internal.h"
#define SLIM_BTL_SCOPE PMIX_GLOBAL
#else
#define SLIM_BTL_OPEN_MPI_5 0
#include "opal/mca/pmix/pmix.h"
#define SLIM_BTL_SCOPE OPAL_PMIX_GLOBAL
#endif

/* Implemented in component.rs. */
struct slim_btl_upcalls {
    void *module;
    int verbose;
    int survives_losses;
    void (*deliver)(const void *endpoint, uint8_t tag, void *data, size_t len);
    void (*lost)(void *proc, uint64_t name, const char *why, size_t len);
    void (*log)(int level, const char *text, size_t len);
    int (*has_failed)(void *proc, uint64_t name);
};

/* Implemented in gets.rs. */
struct slim_btl_callback {
    mca_btl_base_rdma_completion_fn_t call;
    void *local;
    void *handle;
    void *context;
    void *data;
};

/* Bytes of the keys of memory (KEYS_LEN of slim-verbs). */
#define SLIM_BTL_KEYS 80

struct slim_btl_module;

struct slim_btl_module *slim_btl_open(uint64_t name, const char *if_include, const char *if_exclude,
                                      const char *transports, const char *verbs_ports,
                                      struct slim_btl_upcalls upcalls);
size_t slim_btl_blob(struct slim_btl_module *module, int reads, void *to, size_t room);
struct mca_btl_base_endpoint_t *slim_btl_add(struct slim_btl_module *module, uint64_t name, void *proc,
                                             const void *blob, size_t len);
void slim_btl_remove(struct slim_btl_module *module, struct mca_btl_base_endpoint_t *endpoint);
mca_btl_base_descriptor_t *slim_btl_alloc(size_t size, uint32_t flags, uint8_t order);
void slim_btl_free(mca_btl_base_descriptor_t *descriptor);
size_t slim_btl_limit(const struct mca_btl_base_endpoint_t *endpoint, size_t len);
int slim_btl_send(struct slim_btl_module *module, struct mca_btl_base_endpoint_t *endpoint,
                  mca_btl_base_descriptor_t *descriptor, uint8_t tag);
int slim_btl_send_now(struct slim_btl_module *module, struct mca_btl_base_endpoint_t *endpoint, uint8_t tag,
                      const void *header, size_t header_len, const void *payload, size_t payload_len);
int slim_btl_reads_memory(const struct slim_btl_module *module);
int slim_btl_is_read(const struct mca_btl_base_endpoint_t *endpoint);
void *slim_btl_register(const struct slim_btl_module *module, void *at, size_t len, int readable, int sink, unsigned char *keys);
void slim_btl_deregister(void *memory);
void slim_btl_get(const struct slim_btl_module *module, const struct mca_btl_base_endpoint_t *endpoint, uint64_t from,
                  const unsigned char *keys, const void *memory, size_t len, struct slim_btl_callback callback);
int slim_btl_progress(struct slim_btl_module *module);
void slim_btl_dump(const struct slim_btl_module *module);
void slim_btl_close(struct slim_btl_module *module);

/* What frag.rs relies on. */
_Static_assert(sizeof(mca_btl_base_segment_t) == 16, "segment");
_Static_assert(sizeof(mca_btl_base_descriptor_t) == 104, "descriptor");
_Static_assert(offsetof(mca_btl_base_descriptor_t, des_segments) == 56, "des_segments");
_Static_assert(offsetof(mca_btl_base_descriptor_t, des_segment_count) == 64, "des_segment_count");
_Static_assert(offsetof(mca_btl_base_descriptor_t, des_cbfunc) == 72, "des_cbfunc");
_Static_assert(offsetof(mca_btl_base_descriptor_t, des_cbdata) == 80, "des_cbdata");
_Static_assert(offsetof(mca_btl_base_descriptor_t, des_flags) == 96, "des_flags");
_Static_assert(offsetof(mca_btl_base_descriptor_t, order) == 100, "order");
_Static_assert(MCA_BTL_DES_FLAGS_BTL_OWNERSHIP == 2, "BTL_OWNERSHIP");
_Static_assert(MCA_BTL_DES_SEND_ALWAYS_CALLBACK == 4, "ALWAYS_CALLBACK");
_Static_assert(OPAL_ERR_UNREACH == -12, "OPAL_ERR_UNREACH");

#if SLIM_BTL_OPEN_MPI_5
/* What slim_btl_deliver fills. */
_Static_assert(sizeof(mca_btl_base_receive_descriptor_t) == 40, "receive descriptor");
#endif

/* component.c */
extern mca_btl_base_component_t mca_btl_slim_component;
extern struct slim_btl_module *slim_btl;
void slim_btl_log(int level, const char *text, size_t len);

/* module.c */
extern mca_btl_base_module_t mca_btl_slim_module;
void slim_btl_deliver(const void *endpoint, uint8_t tag, void *data, size_t len);
void slim_btl_print(void);

/* memory.c */
/* Returns whether this process can read the memory of peers, and they its own. `keeps`: memory stays registered after its message. */
bool slim_btl_offer_get(mca_btl_base_module_t *btl, size_t least_bytes, bool keeps);
void slim_btl_end_get(void);

/* lost.c */
extern mca_btl_base_module_error_cb_fn_t slim_btl_on_error;
bool slim_btl_survives_losses(void);
int slim_btl_has_failed(void *proc, uint64_t name);
void slim_btl_lost(void *proc, uint64_t name, const char *why, size_t len);

/* The name as one number, ordered as names are. */
static inline uint64_t slim_btl_name(opal_process_name_t name)
{
    return (uint64_t)name.jobid << 32 | name.vpid;
}

#endif
