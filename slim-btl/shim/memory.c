/* Long messages without a copy (btl_get): memory that is registered with adapters, by Open MPI's cache of registrations. */
#include "slim_btl.h"

#include <string.h>

#include "opal/mca/rcache/base/base.h"
#include "opal/mca/rcache/rcache.h"

/* ob1 sends it to the peer. */
struct mca_btl_base_registration_handle_t {
    unsigned char keys[SLIM_BTL_KEYS];
};

struct slim_registration {
    mca_rcache_base_registration_t base;
    void *memory;
    mca_btl_base_registration_handle_t handle;
};

static mca_rcache_base_module_t *rcache;
static size_t least;
/* MCA_RCACHE_FLAGS_CACHE_BYPASS: a registration ends with its message. */
static uint32_t cache_flags;
/* Of memory that cannot be registered. */
static mca_btl_base_registration_handle_t none;

static int make(void *data, void *at, size_t size, mca_rcache_base_registration_t *reg)
{
    struct slim_registration *registration = (struct slim_registration *)reg;
    int readable = 0 != (reg->access_flags & MCA_RCACHE_ACCESS_REMOTE_READ);
    int sink = 0 != (reg->access_flags & MCA_RCACHE_ACCESS_LOCAL_WRITE);

    (void)data;
    registration->memory = slim_btl_register(slim_btl, at, size, readable, sink, registration->handle.keys);
    /* The cache gives up registrations that are not in use, and tries again. */
    return NULL != registration->memory ? OPAL_SUCCESS : OPAL_ERR_OUT_OF_RESOURCE;
}

static int unmake(void *data, mca_rcache_base_registration_t *reg)
{
    struct slim_registration *registration = (struct slim_registration *)reg;

    (void)data;
    if (NULL != registration->memory) {
        slim_btl_deregister(registration->memory);
        registration->memory = NULL;
    }
    return OPAL_SUCCESS;
}

static mca_btl_base_registration_handle_t *slim_register_mem(mca_btl_base_module_t *btl,
                                                             struct mca_btl_base_endpoint_t *endpoint, void *base,
                                                             size_t size, uint32_t flags)
{
    int access = (int)(flags & MCA_BTL_REG_FLAG_ACCESS_ANY) & (MCA_RCACHE_ACCESS_LOCAL_WRITE | MCA_RCACHE_ACCESS_REMOTE_READ);
    struct slim_registration *registration = NULL;
    bool sends = 0 == (flags & MCA_BTL_REG_FLAG_LOCAL_WRITE);

    (void)btl;
    /* The sender offers its memory only if the message is long, and the peer can read it now. */
    if (sends && (size < least || MCA_BTL_ENDPOINT_ANY == endpoint || !slim_btl_is_read(endpoint))) {
        return NULL;
    }
    if (OPAL_SUCCESS != rcache->rcache_register(rcache, base, size, cache_flags, access, (mca_rcache_base_registration_t **)&registration)) {
        /* A receiver that gets nothing here would try again when something else is over, perhaps never. The get fails, and the message is sent. */
        return sends ? NULL : &none;
    }
    return &registration->handle;
}

static struct slim_registration *registration_of(mca_btl_base_registration_handle_t *handle)
{
    return (struct slim_registration *)((char *)handle - offsetof(struct slim_registration, handle));
}

static int slim_deregister_mem(mca_btl_base_module_t *btl, mca_btl_base_registration_handle_t *handle)
{
    (void)btl;
    if (&none != handle && NULL != rcache) {
        (void)rcache->rcache_deregister(rcache, &registration_of(handle)->base);
    }
    return OPAL_SUCCESS;
}

static int slim_get(mca_btl_base_module_t *btl, struct mca_btl_base_endpoint_t *endpoint, void *local_address,
                    uint64_t remote_address, mca_btl_base_registration_handle_t *local_handle,
                    mca_btl_base_registration_handle_t *remote_handle, size_t size, int flags, int order,
                    mca_btl_base_rdma_completion_fn_t callback, void *context, void *data)
{
    const void *memory = NULL;
    const struct slim_btl_callback told = {
        .call = callback, .local = local_address, .handle = local_handle, .context = context, .data = data};

    (void)btl;
    (void)flags;
    (void)order;
    if (NULL != local_handle && &none != local_handle) {
        memory = registration_of(local_handle)->memory;
    }
    /* What fails is told by the callback: ob1 would try an error that is returned here again when something else is over, perhaps never. */
    slim_btl_get(slim_btl, endpoint, remote_address, remote_handle->keys, memory, size, told);
    return OPAL_SUCCESS;
}

bool slim_btl_offer_get(mca_btl_base_module_t *btl, size_t least_bytes, bool keeps)
{
    mca_rcache_base_resources_t resources = {
        .cache_name = "slim",
        .reg_data = NULL,
        .sizeof_reg = sizeof(struct slim_registration),
        .register_mem = make,
        .deregister_mem = unmake,
    };

    if (0 == least_bytes || !slim_btl_reads_memory(slim_btl)) {
        return false;
    }
    rcache = mca_rcache_base_module_create("grdma", btl, &resources);
    if (NULL == rcache) {
        return false;
    }
    least = least_bytes;
    /* A kept registration is of pages, not of addresses. If other pages come to these addresses and the cache does not notice, the bytes of a message are
     * wrong. It notices what Open MPI's hooks see. They do not see a heap that shrinks where UCX has put its own `sbrk` in the place of libc's (Open MPI
     * 5.0 with UCX), nor system calls without libc, `mremap` to a place in use, and files that are cut. */
    cache_flags = keeps ? 0 : MCA_RCACHE_FLAGS_CACHE_BYPASS;
    btl->btl_get = slim_get;
    btl->btl_register_mem = slim_register_mem;
    btl->btl_deregister_mem = slim_deregister_mem;
    btl->btl_registration_handle_size = sizeof(mca_btl_base_registration_handle_t);
    /* A message is read as a whole: ob1 cannot have the rest of one sent. */
    btl->btl_get_limit = SIZE_MAX;
    btl->btl_get_alignment = 0;
    btl->btl_flags |= MCA_BTL_FLAGS_GET;
    /* No message is long enough for the pipeline, which needs btl_put. */
    btl->btl_min_rdma_pipeline_size = SIZE_MAX;
    return true;
}

void slim_btl_end_get(void)
{
    if (NULL != rcache) {
        (void)mca_rcache_base_module_destroy(rcache);
        rcache = NULL;
    }
}
