/* A stand-in for Metal on GNU's Objective-C runtime. STANDIN picks the device's class, HV_VMM what the kernel says.
 * With -DPROGRAM: a program that asks Metal (create, all, threads), starts a child (child) or does neither (idle). */
#include <objc/Object.h>
#include <objc/runtime.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef unsigned long long NSUInteger;
id MTLCreateSystemDefaultDevice(void), MTLCopyAllDevices(void);

#ifndef PROGRAM
static const char *device_name = "Apple Paravirtual device";
static bool metal3;
static bool stock(long long f, long long apple) { return (f > 1000 && f <= apple) || f == 2002 || f == 3003; }
#define DEVICE(name, base, methods) @interface name : base @end @implementation name methods @end
#define FAMILY(type, answer) - (bool)supportsFamily:(type)f { return answer; }
#define MEMORY(type, answer) - (type)maxThreadgroupMemoryLength { return answer; }
DEVICE(Text, Object, - (const char *)UTF8String { return device_name; })
DEVICE(Named, Object, - (id)name { return class_createInstance(objc_lookUpClass("Text"), 0); })
DEVICE(Base, Named, FAMILY(long long, stock(f, 1005)) MEMORY(NSUInteger, 32768)
       - (NSUInteger)recommendedMaxWorkingSetSize { return 12009340928ULL; })
DEVICE(Ordinary, Base, FAMILY(long long, stock(f, 1005)) MEMORY(NSUInteger, 32768))
DEVICE(Inheriting, Base, )
DEVICE(BareMetal, Base, - (id)name { device_name = "Apple M1 Ultra"; return [super name]; })
DEVICE(Nameless, Base, - (id)name { return nil; })
DEVICE(Lacking, Named, MEMORY(NSUInteger, 1))
DEVICE(Odd, Base, MEMORY(double, 32768))
DEVICE(Narrow, Base, FAMILY(int, stock(f, 1005)))
DEVICE(Enough, Base, FAMILY(long long, stock(f, 1009)) MEMORY(NSUInteger, 65536))
DEVICE(Flapping, Base, FAMILY(long long, f == 5001 ? (metal3 = !metal3) : stock(f, 1005))) /* nothing can be verified */
DEVICE(List, Object, - (unsigned long)count { return 1; }
       - (id)objectAtIndex:(unsigned long)i { return i ? nil : MTLCreateSystemDefaultDevice(); })
id MTLCreateSystemDefaultDevice(void) {
    const char *name = getenv("STANDIN");
    return class_createInstance(objc_lookUpClass(name ? name : "Ordinary"), 0);
}
id MTLCopyAllDevices(void) { return class_createInstance(objc_lookUpClass("List"), 0); }
int sysctlbyname(const char *name, void *value, size_t *size, void *set, size_t length) {
    const char *text = getenv("HV_VMM");
    *(int *)value = text ? atoi(text) : 1;
    return strcmp(name, "kern.hv_vmm_present") || *size != sizeof(int);
}
#else
@interface Base : Object
- (bool)supportsFamily:(long long)f;
- (NSUInteger)maxThreadgroupMemoryLength;
@end
static void *ask(void *unused) {
    Base *device = MTLCreateSystemDefaultDevice();
    return (void *)(long)([device supportsFamily:1009] ? [device maxThreadgroupMemoryLength] : 0);
}
static void show(Base *device, char end) { /* families 1009 and 1010, and the threadgroup memory */
    for (int family = 1009; family <= 1010; family++)
        if (class_getInstanceMethod(object_getClass(device), @selector(supportsFamily:)))
            printf("%d", [device supportsFamily:family]);
    printf(" %llu%c", [device maxThreadgroupMemoryLength], end);
}
int main(int count, char **arguments) {
    const char *what = count > 1 ? arguments[1] : "create";
    int threads = strcmp(what, "threads") ? 0 : 16;
    pthread_t asking[16];
    void *answer;
    if (!strcmp(what, "idle")) return 3;
    if (!strcmp(what, "child")) return ask(NULL), system("env") != 0;
    if (!strcmp(what, "all")) MTLCopyAllDevices();
    for (int i = 0; i < threads; i++) pthread_create(asking + i, NULL, ask, NULL);
    for (int i = 0; i < threads; i++)
        if (pthread_join(asking[i], &answer) || answer != (void *)65536L) return 1;
    show(MTLCreateSystemDefaultDevice(), ' ');
    show(class_createInstance(objc_lookUpClass("Base"), 0), '\n');
}
#endif
