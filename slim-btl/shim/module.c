/* The module: Open MPI's functions, by those of libslim_btl.a. */
#include "slim_btl.h"

#include <stdlib.h>
#include <string.h>

/* Below this, packing costs less than another piece in the system call. */
#define IN_PLACE 4096
/* The most that btl_sendi packs. */
#define SENDI 4096

/* What the component of a process has published, to be freed. */
static bool published(opal_proc_t *proc, void **blob, size_t *len)
{
#if SLIM_BTL_OPEN_MPI_5
    /* Without a limit, PMIx would wait for a process that has no component and will never publish anything for it. */
    int limit = 2;
    char *key = mca_base_component_to_string(&mca_btl_slim_component.btl_version);
    pmix_value_t *value = NULL;
    pmix_proc_t name;
    pmix_info_t info;
    bool found;

    OPAL_PMIX_CONVERT_NAME(&name, &proc->proc_name);
    PMIX_INFO_LOAD(&info, PMIX_TIMEOUT, &limit, PMIX_INT);
    found = NULL != key && PMIX_SUCCESS == PMIx_Get(&name, key, &info, 1, &value) && NULL != value &&
            PMIX_BYTE_OBJECT == value->type && NULL != value->data.bo.bytes;
    if (found) {
        *blob = value->data.bo.bytes;
        *len = value->data.bo.size;
        value->data.bo.bytes = NULL; /* the caller's */
    }
    PMIX_INFO_DESTRUCT(&info);
    if (NULL != value) {
        PMIX_VALUE_RELEASE(value);
    }
    free(key);
    return found;
#else
    int rc;

    OPAL_MODEX_RECV(rc, &mca_btl_slim_component.btl_version, &proc->proc_name, blob, len);
    return OPAL_SUCCESS == rc && NULL != *blob;
#endif
}

static int slim_add_procs(mca_btl_base_module_t *btl, size_t count, opal_proc_t **procs,
                          struct mca_btl_base_endpoint_t **endpoints, opal_bitmap_t *reachable)
{
    (void)btl;
    for (size_t i = 0; i < count; i++) {
        struct mca_btl_base_endpoint_t *endpoint = NULL;
        void *blob = NULL;
        size_t len = 0;

        if (procs[i] == opal_proc_local_get()) {
            continue;
        }
        if (published(procs[i], &blob, &len)) {
            endpoint = slim_btl_add(slim_btl, slim_btl_name(procs[i]->proc_name), procs[i], blob, len);
        }
        free(blob);
        if (NULL == endpoint) {
            continue; /* it runs without this component */
        }
        endpoints[i] = endpoint;
        if (NULL != reachable) {
            opal_bitmap_set_bit(reachable, (int)i);
        }
    }
    return OPAL_SUCCESS;
}

static int slim_del_procs(mca_btl_base_module_t *btl, size_t count, opal_proc_t **procs,
                          struct mca_btl_base_endpoint_t **endpoints)
{
    (void)btl;
    (void)procs;
    for (size_t i = 0; i < count; i++) {
        if (NULL != endpoints[i] && NULL != slim_btl) {
            slim_btl_remove(slim_btl, endpoints[i]);
            endpoints[i] = NULL;
        }
    }
    return OPAL_SUCCESS;
}

static int slim_finalize(mca_btl_base_module_t *btl)
{
    struct slim_btl_module *module = slim_btl;

    (void)btl;
    if (NULL != module) {
        if (slim_btl_survives_losses()) {
            opal_progress_event_users_decrement();
        }
        slim_btl_end_get();
        slim_btl = NULL;
        slim_btl_close(module);
    }
    return OPAL_SUCCESS;
}

static mca_btl_base_descriptor_t *slim_alloc(mca_btl_base_module_t *btl, struct mca_btl_base_endpoint_t *endpoint,
                                             uint8_t order, size_t size, uint32_t flags)
{
    (void)btl;
    (void)endpoint;
    return slim_btl_alloc(size, flags, order);
}

static int slim_free(mca_btl_base_module_t *btl, mca_btl_base_descriptor_t *descriptor)
{
    (void)btl;
    slim_btl_free(descriptor);
    return OPAL_SUCCESS;
}

/* A descriptor with room for a header of `reserve` bytes, and up to `*size` bytes of the convertor's data. */
static mca_btl_base_descriptor_t *slim_prepare_src(mca_btl_base_module_t *btl,
                                                   struct mca_btl_base_endpoint_t *endpoint,
                                                   struct opal_convertor_t *convertor, uint8_t order, size_t reserve,
                                                   size_t *size, uint32_t flags)
{
    size_t len = *size;
    struct iovec iov;
    uint32_t count = 1;
    bool in_place;
    mca_btl_base_descriptor_t *descriptor;

    if (reserve + len > btl->btl_max_send_size) {
        len = btl->btl_max_send_size - reserve;
    }
    /* Open MPI does not expect that an eager message is cut. */
    if (reserve + len > btl->btl_eager_limit && reserve + len > btl->btl_rndv_eager_limit) {
        len = slim_btl_limit(endpoint, len);
    }
    in_place = len >= IN_PLACE && !opal_convertor_need_buffers(convertor);
    descriptor = slim_btl_alloc(reserve + (in_place ? 0 : len), flags, order);
    if (NULL == descriptor) {
        return NULL;
    }
    /* Without a place to pack to, the convertor says where the data is. */
    iov.iov_base = in_place ? NULL : (char *)descriptor->des_segments[0].seg_addr.pval + reserve;
    iov.iov_len = len;
    if (opal_convertor_pack(convertor, &iov, &count, &len) < 0) {
        slim_btl_free(descriptor);
        return NULL;
    }
    if (in_place) {
        descriptor->des_segments[1].seg_addr.pval = iov.iov_base;
        descriptor->des_segments[1].seg_len = len;
        descriptor->des_segment_count = 2;
    } else {
        descriptor->des_segments[0].seg_len = reserve + len;
    }
    *size = len;
    return descriptor;
}

static int slim_send(mca_btl_base_module_t *btl, struct mca_btl_base_endpoint_t *endpoint,
                     mca_btl_base_descriptor_t *descriptor, mca_btl_base_tag_t tag)
{
    (void)btl;
    return slim_btl_send(slim_btl, endpoint, descriptor, tag);
}

/* A small message without a descriptor. If it cannot be sent at once, the caller gets a descriptor, fills it and goes by btl_send. */
static int slim_sendi(mca_btl_base_module_t *btl, struct mca_btl_base_endpoint_t *endpoint,
                      struct opal_convertor_t *convertor, void *header, size_t header_size, size_t payload_size,
                      uint8_t order, uint32_t flags, mca_btl_base_tag_t tag, mca_btl_base_descriptor_t **descriptor)
{
    char packed[SENDI];
    struct iovec iov = {.iov_base = NULL, .iov_len = payload_size};
    size_t len = 0;
    uint32_t count = 1;

    if (payload_size <= SENDI) {
        if (payload_size > 0) {
            len = payload_size;
            if (opal_convertor_need_buffers(convertor)) {
                iov.iov_base = packed;
            }
            (void)opal_convertor_pack(convertor, &iov, &count, &len);
        }
        if (len == payload_size &&
            0 == slim_btl_send_now(slim_btl, endpoint, tag, header, header_size, iov.iov_base, payload_size)) {
            return OPAL_SUCCESS;
        }
        if (payload_size > 0) {
            size_t start = 0; /* the caller packs it again */
            opal_convertor_set_position(convertor, &start);
        }
    }
    if (NULL != descriptor) {
        *descriptor = slim_alloc(btl, endpoint, order, header_size + payload_size, flags);
    }
    return OPAL_ERR_RESOURCE_BUSY;
}

static int slim_register_error(mca_btl_base_module_t *btl, mca_btl_base_module_error_cb_fn_t callback)
{
    (void)btl;
    slim_btl_on_error = callback;
    return OPAL_SUCCESS;
}

/* Without arguments, to be called in a debugger: call (void)slim_btl_print() */
__attribute__((used)) void slim_btl_print(void)
{
    if (NULL != slim_btl) {
        slim_btl_dump(slim_btl);
    }
}

static void slim_dump(mca_btl_base_module_t *btl, struct mca_btl_base_endpoint_t *endpoint, int verbose)
{
    mca_btl_base_dump(btl, endpoint, verbose);
    slim_btl_print();
}

void slim_btl_deliver(const void *endpoint, uint8_t tag, void *data, size_t len)
{
    mca_btl_active_message_callback_t *receiver = &mca_btl_base_active_message_trigger[tag];
    mca_btl_base_segment_t segment = {.seg_addr.pval = data, .seg_len = len};
#if SLIM_BTL_OPEN_MPI_5
    const mca_btl_base_receive_descriptor_t descriptor = {
        .endpoint = (struct mca_btl_base_endpoint_t *)endpoint,
        .des_segments = &segment,
        .des_segment_count = 1,
        .tag = tag,
        .cbdata = receiver->cbdata,
    };

    receiver->cbfunc(&mca_btl_slim_module, &descriptor);
#else
    mca_btl_base_descriptor_t descriptor;

    (void)endpoint;
    memset(&descriptor, 0, sizeof descriptor);
    descriptor.des_segments = &segment;
    descriptor.des_segment_count = 1;
    receiver->cbfunc(&mca_btl_slim_module, tag, &descriptor, receiver->cbdata);
#endif
}

mca_btl_base_module_t mca_btl_slim_module = {
    .btl_component = &mca_btl_slim_component,
    .btl_add_procs = slim_add_procs,
    .btl_del_procs = slim_del_procs,
    .btl_finalize = slim_finalize,
    .btl_alloc = slim_alloc,
    .btl_free = slim_free,
    .btl_prepare_src = slim_prepare_src,
    .btl_send = slim_send,
    .btl_sendi = slim_sendi,
    .btl_dump = slim_dump,
    .btl_register_error = slim_register_error,
};

_Static_assert(sizeof(mca_btl_base_module_t) == 560, "module");
_Static_assert(offsetof(mca_btl_base_module_t, btl_add_procs) == 136, "btl_add_procs");
_Static_assert(offsetof(mca_btl_base_module_t, btl_send) == 192, "btl_send");
_Static_assert(offsetof(mca_btl_base_module_t, btl_register_error) == 280, "btl_register_error");
